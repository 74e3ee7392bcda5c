"""Runs keytail from a task, here or on a broker's host: logs its output by line, stops it by SIGTERM, reads its rows.

A command runs under a small shell whose standard input is held open. When the standard input closes, because the task
was killed or timed out, or its worker died, the shell sends SIGTERM to the command, on whichever host the command runs:
keytail then stops within seconds, with its locks released and its scratch files removed. Signals alone would not pass
through ssh or sudo.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Any

from airflow.sdk.exceptions import AirflowException, AirflowFailException

from keytail_provider.brokers import HERE, Host, InventoryError
from keytail_provider.processes import Local, NotStarted, Process

# Exit statuses that keytail does not use, but timeout(1) and shells do.
TIMED_OUT = 124
NOT_FOUND = (126, 127)
# Rows of these statuses are listed in the XCom before all others.
BAD = frozenset({"corrupt", "damaged", "failed", "refused", "differs", "fail"})
_WORRYING = frozenset({"suspect", "interrupted", "partly", "warn"})
_RETRY_HELPS = frozenset({"failed"})
MAX_ROWS = 50
LARGEST_ROWS = 10
MAX_TEXT = 600
# Seconds that keytail may take to stop; a few seconds suffice. Then the process group is killed, which is safe, too.
GRACE_S = 60.0

# A background command of a shell has no standard input. The line `go` shows that standard input is passed on to the
# host.
_UNDER_A_SHELL = """\
if read -r go; then
  exec 3<&0
  "$@" </dev/null 3<&- & child=$!
  (while read -r line <&3; do :; done; kill -TERM "$child") >/dev/null 2>&1 & watcher=$!
  wait "$child"; status=$?
  kill "$watcher" 2>/dev/null
  exit "$status"
fi
echo "keytail: standard input is not passed on to this host, so the command was not started" >&2
exit 2
"""


@dataclass(frozen=True)
class Ended:
    """The result of a command: the `rows` on its standard output, or `output` if requested; `last_lines` is the
    end of its standard error."""

    exit_status: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    last_lines: str = ""
    output: str = ""


def run(
    words: Sequence[str],
    host: Host = HERE,
    timeout_s: float | None = None,
    on_line: Callable[[str], None] = print,
    parse_rows: bool = True,
    grace_s: float = GRACE_S,
    keep_output: bool = False,
) -> Ended:
    """Run a command on a host to its end, and return its result; its standard error is passed to `on_line` as it
    arrives.

    After `timeout_s` the command is stopped, and the status is 124. The command is also stopped if this process gets
    SIGTERM, or if an exception is raised here (such as Airflow's own timeout). `parse_rows`: standard output is a JSON
    array; if not set, standard output is logged like standard error. `keep_output`: the standard output of a command
    without rows is returned in `output` and not logged. Raises AirflowFailException if standard output should be an
    array and is not, after status 0 or 3, and InventoryError for a mistake in the Connection of the host.
    """
    line = ["sh", "-c", _UNDER_A_SHELL, "keytail", *words]
    command = [*host.prefix, shlex.join(line)] if host.prefix else line
    on_line(f"$ {host.shown(words)}")
    last_lines: deque[str] = deque(maxlen=20)

    def log_line(text: str) -> None:
        last_lines.append(text[:MAX_TEXT])
        on_line(text)

    with tempfile.TemporaryFile() as output:
        into = output if parse_rows or keep_output else None
        try:
            process = _process(command, host.ssh_conn_id, into)
        except NotStarted as problem:
            log_line(str(problem))
            return Ended(problem.status, last_lines="\n".join(last_lines))
        timed_out, status = _follow(process, timeout_s, grace_s, log_line)
        output.seek(0)
        said = output.read()
    status = TIMED_OUT if timed_out else status
    rows = _rows(said, status) if parse_rows else []
    kept = said.decode(errors="replace") if keep_output else ""
    return Ended(status if status >= 0 else 128 - status, rows, "\n".join(last_lines), kept)


def _process(words: Sequence[str], ssh_conn_id: str | None, output: IO[bytes] | None) -> Process:
    if ssh_conn_id is None:
        return Local(words, output)
    try:
        from keytail_provider.ssh import OverSsh  # noqa: PLC0415 (Airflow's SSH provider is needed only here)
    except ImportError as problem:
        raise InventoryError(f"ssh_conn_id needs the package apache-airflow-providers-ssh: {problem}") from problem
    return OverSsh(ssh_conn_id, shlex.join(words), output)


def _follow(
    process: Process, timeout_s: float | None, grace_s: float, log_line: Callable[[str], None]
) -> tuple[bool, int]:
    """Wait until the process has ended, logging its output. Return whether it took longer than `timeout_s`, and its
    exit status."""
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    kill_at_s: float | None = None
    timed_out = got_sigterm = False

    def at_sigterm() -> None:  # it may interrupt a function that holds a lock, which `stop` needs
        nonlocal got_sigterm
        got_sigterm = True

    def stop() -> None:
        nonlocal kill_at_s
        if kill_at_s is None:
            kill_at_s = time.monotonic() + grace_s
            process.close_input()

    try:
        process.write(b"go\n")
        with _at_sigterm(at_sigterm):
            for line in _lines(process):
                if line is not None:
                    log_line(line)
                if got_sigterm:
                    stop()
                now_s = time.monotonic()
                if until_s is not None and now_s > until_s and not timed_out:
                    timed_out = True
                    log_line(f"not finished after {timeout_s:g} s: stopped")
                    stop()
                if kill_at_s is not None and now_s > kill_at_s:
                    process.kill()
        return timed_out, _wait(process, None)
    except BaseException:  # Airflow's execution_timeout is not an Exception
        stop()
        if _wait(process, grace_s) is None:
            process.kill()
            _wait(process, None)
        raise
    finally:
        process.close()


def _wait(process: Process, timeout_s: float | None) -> Any:
    """Return the exit status of the process, or None if the process has not ended within this time."""
    until_s = None if timeout_s is None else time.monotonic() + timeout_s
    while (status := process.poll()) is None and (until_s is None or time.monotonic() < until_s):
        time.sleep(0.05)
    return status


def _lines(process: Process) -> Iterator[str | None]:
    """Yield the output by line, and None at least twice a second, until the process has ended and all output is read.

    A child of the process may hold its output open longer: reading ends one second after the process.
    """
    buffered = b""
    ended_s: float | None = None
    while ended_s is None or time.monotonic() < ended_s + 1:
        read = process.read(0.2)
        if read == b"":
            break
        if read:
            *whole, buffered = (buffered + read).split(b"\n")
            yield from (line.decode(errors="replace").rstrip("\r") for line in whole)
        if ended_s is None and process.poll() is not None:
            ended_s = time.monotonic()
        yield None
    if buffered:
        yield buffered.decode(errors="replace")
    while process.poll() is None:  # the process has closed its output, and is still running
        time.sleep(0.05)
        yield None


@contextlib.contextmanager
def _at_sigterm(function: Callable[[], None]) -> Iterator[None]:
    """Call a function at SIGTERM, which Airflow sends seconds before SIGKILL to end a task, and which a Python task
    ignores.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)

    def handle(number: int, frame: FrameType | None) -> None:
        function()
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        # None: the handler was not set by Python.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _rows(output: bytes, status: int) -> list[dict[str, Any]]:
    try:
        rows = json.loads(output)
        if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
            return rows
    except ValueError:
        pass
    if status in (0, 3):
        begin = output[:200].decode(errors="replace")
        raise AirflowFailException(
            f"standard output is not a JSON array of rows, although the status is {status}; it begins with {begin!r}. "
            "Make sure that a login prints nothing on standard output"
        )
    return []


def outcome(ended: Ended) -> dict[str, Any]:
    """Return the summary that the task stores in its XCom, with a limited number of rows, or raise the task's error.

    Status 0, and 1 with only warnings: success. 3, or 1 with some rows bad: `partial` is true, and the task succeeds,
    as a retry of everything would not help those rows. 1 with all rows bad and none `failed`, 2, and a missing program:
    no retry. Everything else (a lock that is held, a host that is not reached, a kill) is handled by Airflow's retries.
    """
    rows, status = ended.rows, ended.exit_status
    bad = [row for row in rows if row.get("status") in BAD]
    if status in (0, 3) or (status == 1 and rows and len(bad) < len(rows)):
        return summary(rows, status)
    if status == 1 and rows:
        text = f"nothing was done (0 of {len(rows)}): {_named(bad)}"
        if any(row["status"] in _RETRY_HELPS for row in bad):
            raise AirflowException(text)
        raise AirflowFailException(text)
    last = _short(ended.last_lines) or "no output"
    if status == 2:
        raise AirflowFailException(f"wrong usage, so a retry would not help: {last}")
    if status in NOT_FOUND:
        raise AirflowFailException(f"command not found, or not executable (status {status}): {last}")
    if status == TIMED_OUT:
        raise AirflowException(f"stopped because it took too long: {last}")
    if 128 < status <= 128 + signal.NSIG:
        raise AirflowException(f"ended by signal {status - 128}: {last}")
    raise AirflowException(f"could not start, or its host was not reached (status {status}): {last}")


def summary(rows: Sequence[Mapping[str, Any]], status: int) -> dict[str, Any]:
    """Return counts, sizes, the rows that need attention, then the largest rows, and the number of rows left out."""
    bad = [row for row in rows if row.get("status") in BAD]
    worrying = [row for row in rows if row.get("status") in _WORRYING]
    others = [row for row in rows if row.get("status") not in BAD | _WORRYING]
    others.sort(key=lambda row: -(_size(row, "bytes_before") or _size(row, "bytes") or 0))
    kept = [*bad, *worrying][:MAX_ROWS]
    kept += others[: min(LARGEST_ROWS, MAX_ROWS - len(kept))]
    done = [row for row in rows if _size(row, "bytes_before") is not None and _size(row, "bytes_after") is not None]
    return {
        "exit_status": status,
        "partial": status == 3 or (status == 1 and bool(bad)),
        "partitions": len(rows),
        "counts": dict(Counter(str(row.get("status")) for row in rows)),
        "bytes_before": sum(row["bytes_before"] for row in done),
        "bytes_after": sum(row["bytes_after"] for row in done),
        "rows": [_cut(row) for row in kept],
        "rows_left_out": len(rows) - len(kept),
    }


def _size(row: Mapping[str, Any], key: str) -> int | None:
    value = row.get(key)
    return value if isinstance(value, int) else None


def _cut(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with lists (findings, segments, settings) replaced by their lengths, and long texts truncated."""
    made: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, (list, dict)):
            made[key] = len(value)
            if key == "findings" and value:
                made["first_finding"] = _short(str(value[0].get("what")))
        elif value is not None and value != "":
            made[key] = _short(value) if isinstance(value, str) else value
    return made


def name_of(row: Mapping[str, Any]) -> str:
    """Return the name of the partition, or of the other subject of the row."""
    if row.get("topic") is not None:
        return f"{row['topic']}-{row.get('partition')}"
    return str(row.get("table") or row.get("check") or row.get("log_dir") or "?")


def in_words(row: Mapping[str, Any]) -> str:
    """Return the row as `orders-0 corrupt: what is wrong`."""
    what = row.get("first_finding") or row.get("error") or ""
    findings = row.get("findings")
    if isinstance(findings, list) and findings:
        what = findings[0].get("what") or what
    return f"{name_of(row)} {row.get('status')}" + (f": {_short(str(what))}" if what else "")


def _named(rows: Sequence[Mapping[str, Any]]) -> str:
    more = f"; and {len(rows) - 5} more" if len(rows) > 5 else ""
    return "; ".join(in_words(row) for row in rows[:5]) + more


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
