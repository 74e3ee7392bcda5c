"""A line of `doctor`."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class CheckRow:
    """One check. `status`: `ok`; `warn`: runs work, but with restrictions; `fail`: runs would not work.

    `remedy`: what to do about `warn` and `fail`. For programs, in a check of a log dir: `log_dir` is its path,
    `clean_shutdown` whether it has .kafka_cleanshutdown, `held` whether its lock is held. None: not checked, or it
    cannot be determined.
    """

    check: str
    status: str
    found: str
    remedy: str = ""
    log_dir: str | None = None
    clean_shutdown: bool | None = None
    held: bool | None = None
