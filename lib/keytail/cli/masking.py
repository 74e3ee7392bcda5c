"""Makes text safe for a page: removes secrets, and escapes invisible characters."""

from __future__ import annotations

import re
from collections.abc import Sequence

from keytail.errors import visible

HIDDEN = "***"
# user:password@ and user@ of a URL, with any scheme; a password may have slashes and @, so it extends to the last @.
_IN_URL = re.compile(r"(?<=://)(?:[^@\s'\"]*:[^\s'\"]*|[^/\s'\"]+)(?=@)")
# name=value or name: value, even in a URL, if the name ends in a word that marks the value as a secret.
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
    """Return the arguments with secrets masked, including the value after a flag whose name marks it as a secret."""
    shown = []
    hide_next = False
    for argument in arguments:
        shown.append(HIDDEN if hide_next else masked(argument))
        hide_next = argument.startswith("--") and "=" not in argument and _NAME.search(argument) is not None
    return shown


def shown(text: str) -> str:
    """Mask secrets and escape control characters. Line breaks are kept; invalid UTF-8, which file names may contain, is
    written with backslashes.
    """
    lines = masked(text).split("\n")
    return "\n".join(map(visible, lines)).encode("utf-8", "backslashreplace").decode()
