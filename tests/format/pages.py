"""Reads the worked examples of the format pages, so that tests parse the bytes that people read."""

from __future__ import annotations

import re
from pathlib import Path

import keytail.format

_FOLDER = Path(keytail.format.__file__).parent
_BLOCK = re.compile(r"^```(hex|text) (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> dict[str, bytes]:
    """Return, by name, the bytes of every fenced block of `page` marked `hex` or `text`; in hex, `#` begins a comment.
    """
    found: dict[str, bytes] = {}
    for kind, name, body in _BLOCK.findall((_FOLDER / page).read_text("utf-8")):
        assert name not in found, f"{page} has two blocks named {name}"
        if kind == "hex":
            digits = "".join(line.partition("#")[0] for line in body.splitlines())
            found[name] = bytes.fromhex("".join(digits.split()))
        else:
            found[name] = body.encode()
    return found
