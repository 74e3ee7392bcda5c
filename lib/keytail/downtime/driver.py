"""Appends the downtime of a broker to a ledger. No log dir is read.

No time is inferred: a time that is not given is null in the ledger.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import secrets
import time
from collections.abc import Sequence
from typing import Any

from keytail.cli.options import parse_time
from keytail.downtime.command import DowntimeRow, Request
from keytail.durations import duration_text
from keytail.errors import UsageProblem
from keytail.ledger import history
from keytail.ledger.command import ledger_at
from keytail.ledger.of_run import LedgerFlags, run_id_at
from keytail.ledger.write import Ledger
from keytail.run.engine import Engine, ThisProcess
from keytail.run.spark.session import session_of_run

# Tolerated difference between the clocks of this host and of the host that measured the times.
_CLOCK_TOLERANCE_MS = 60_000


def downtime(request: Request, now_ms: int | None = None) -> list[DowntimeRow]:
    """Record the downtime in the ledger and return its row. Raises UsageProblem for an empty name of the broker,
    impossible times, or an unknown run."""
    times: dict[str, Any] = {
        "down_at_ms": parse_time(request.down_at, "--down-at"),
        "reachable_at_ms": _parsed(request.reachable_at, "--reachable-at"),
        "in_sync_at_ms": _parsed(request.in_sync_at, "--in-sync-at"),
    }
    if not request.broker.strip():
        raise UsageProblem("--broker is empty", remedy="Give the name of the broker", slug="invalid-downtime")
    _check(list(times.values()), time.time_ns() // 1_000_000 if now_ms is None else now_ms)
    flags = ledger_at(request.ledger, request.delta_jars)
    run_id = _own_id(request.broker, times["down_at_ms"])
    if request.run_id is not None:
        run_id = history.run(flags, request.run_id, master=request.master)[0].run_id
    with contextlib.ExitStack() as run:
        assert flags.path is not None
        # Appends are numbered per writer. If the writer were the id of the run, this append would have the number of
        # the run's first append, and would be treated as the retry of that append.
        writer = f"downtime-{secrets.token_hex(4)}"
        ledger = Ledger(_engine(run, flags, request.master), flags.path, writer, "downtime")
        ledger.open()
        ledger.record_downtime(run_id, broker=request.broker, **times)
    return [DowntimeRow(run_id, request.broker, "recorded", **times)]


def _parsed(text: str | None, flag: str) -> int | None:
    return None if text is None else parse_time(text, flag)


def _check(times: Sequence[int | None], now_ms: int) -> None:
    """Raise UsageProblem if the times (down, reachable, in sync) are not in this order, one is in the future, or in
    sync is given without reachable."""
    down, reachable, in_sync = times
    if in_sync is not None and reachable is None:
        raise UsageProblem(
            "--in-sync-at requires --reachable-at",
            remedy="Give --reachable-at, or omit --in-sync-at",
            slug="missing-flag",
        )
    known = [("--down-at", down), ("--reachable-at", reachable), ("--in-sync-at", in_sync)]
    given = [(flag, at) for flag, at in known if at is not None]
    for (before, earlier), (flag, later) in itertools.pairwise(given):
        if later < earlier:
            raise UsageProblem(
                f"{flag} is {duration_text(earlier - later)} before {before}",
                remedy="Give times in the order --down-at, --reachable-at, --in-sync-at",
                slug="invalid-downtime",
            )
    flag, last = given[-1]
    if last > now_ms + _CLOCK_TOLERANCE_MS:
        raise UsageProblem(
            f"{flag} is {duration_text(last - now_ms)} in the future",
            remedy="Give ms since 1970, or a time with its time zone, and check the clocks of both hosts",
            slug="invalid-downtime",
        )


def _own_id(broker: str, down_at_ms: int) -> str:
    """Return the id of a downtime without a run. The id depends only on the broker and the time, so a downtime that is
    recorded twice is shown once."""
    return run_id_at(down_at_ms, hashlib.sha256(f"{broker} {down_at_ms}".encode()).hexdigest()[:8])


def _engine(run: contextlib.ExitStack, flags: LedgerFlags, master: str | None) -> Engine:
    if master is None and not flags.why_spark():
        return ThisProcess()
    return session_of_run(run, master, submitted=False, extra=flags.session_settings())
