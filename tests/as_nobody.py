"""``python as_nobody.py ARGS``: ``pack ARGS`` as a user without rights of its own, also where the tests are run by root.

Everything is imported before the rights are given up: the interpreter itself may lie where only root can read. So the command must run
in this process: ``--workers 1``.
"""

from __future__ import annotations

import importlib
import io
import os
import pkgutil

import numpy as np
from PIL import Image

import loaders
import packer
from packer.cli import main

NOBODY = 65534

if __name__ == "__main__":
    for package in (packer, loaders):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            importlib.import_module(module.name)
    Image.init()
    for codec in ("utf-8-sig", "utf-16", "latin-1", "unicode_escape"):
        "a".encode(codec)
    memory = io.BytesIO()  # NumPy imports what it reads archives with when it first does
    np.savez(memory, a=np.zeros(1))
    with np.load(io.BytesIO(memory.getvalue()), allow_pickle=False) as arrays:
        assert arrays["a"].shape == (1,)
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        assert os.getuid() == os.geteuid() == NOBODY
    main()
