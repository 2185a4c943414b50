"""Where the command `pack` begins: Ctrl-C is quiet from the first moment on, also while the rest is imported."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing was begun: the process just ends
    from packer.cli import main as command

    signal.signal(signal.SIGINT, before)
    command()


if __name__ == "__main__":
    main()
