"""What a class name may be, whatever the kind of source."""

from __future__ import annotations

from packer.sample import MAX_CLASS_CHARS


def long_name(name: str) -> str | None:
    """What is wrong with a class name that is too long (code ``bad-class-name``); None of a sound one."""
    if len(name) <= MAX_CLASS_CHARS:
        return None
    return f"its class name has {len(name):,} characters, at most {MAX_CLASS_CHARS}: {name[:80]!r}..."
