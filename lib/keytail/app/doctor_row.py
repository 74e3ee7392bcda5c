"""A line of `doctor`."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class CheckRow:
    """`status`: `ok`; `warn`: all works, but not as well as it could, or not all of it; `fail`: runs would not work.

    `remedy` says what to do about the latter two.
    """

    check: str
    status: str
    found: str
    remedy: str = ""
