"""A line of `doctor`."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class CheckRow:
    """`status`: `ok`; `warn`: all works, but not as well as it could, or not all of it; `fail`: runs would not work.

    `remedy` says what to do about the latter two. For programs, of a check of a log dir: `log_dir` which one,
    `clean_shutdown` whether it has the file of a clean shutdown, `held` whether its lock is held. None: it was not
    asked, or cannot be.
    """

    check: str
    status: str
    found: str
    remedy: str = ""
    log_dir: str | None = None
    clean_shutdown: bool | None = None
    held: bool | None = None
