"""Converts sizes in bytes to text."""

from __future__ import annotations


def human_bytes(size: int | None) -> str:
    """Return a size in bytes as text such as `1.2 GiB`; "" for an unknown size (None)."""
    if size is None:
        return ""
    if abs(size) < 1024:
        return f"{size} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if abs(value) < 1023.95 or unit == "TiB":
            break
    return f"{value:.1f} {unit}"
