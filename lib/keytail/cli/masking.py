"""Text as a page may show it: without secrets, and without characters that a reader cannot see."""

from __future__ import annotations

import re
from collections.abc import Sequence

from keytail.errors import visible

HIDDEN = "***"
# user@ and user:password@ of a URL, whatever the scheme; passwords may have slashes.
_IN_URL = re.compile(r"(?<=://)(?:[^/@\s'\"]+|[^@\s'\"]*:[^@\s'\"]*)(?=@)")
# name=value or name: value where the name ends in a word that says that the value is a secret; of a URL too.
_NAMED = re.compile(
    r"(?i)((?:password|passwd|secret(?:[._-]?key)?|token|credentials?|signature|access[._-]?key|api[._-]?key"
    r"|jaas[._-]?config)[\"']?\s*[=:]\s*[\"']?)([^\s,;&\"']+)"
)
_NAME = re.compile(r"(?i)(password|passwd|secret|token|credential|signature|access[._-]?key|api[._-]?key|jaas)")


def masked(text: str) -> str:
    if "://" in text:
        text = _IN_URL.sub(HIDDEN, text)
    if _NAME.search(text):
        text = _NAMED.sub(rf"\g<1>{HIDDEN}", text)
    return text


def masked_arguments(arguments: Sequence[str]) -> list[str]:
    """Also the value behind a flag whose name says that it is a secret."""
    shown = []
    hide_next = False
    for argument in arguments:
        shown.append(HIDDEN if hide_next else masked(argument))
        hide_next = argument.startswith("--") and "=" not in argument and _NAME.search(argument) is not None
    return shown


def shown(text: str) -> str:
    """Lines stay lines; what no encoding has (names of files need not be text) is written with backslashes."""
    lines = masked(text).split("\n")
    return "\n".join(map(visible, lines)).encode("utf-8", "backslashreplace").decode()
