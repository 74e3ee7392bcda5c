"""Stops before every file operation of a compaction that first rolls the active segments, and makes each one fail.
After every stop, a broker finds the log unchanged, rolled or compacted; the next run has the result of the reference
model on a rolled log.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from keytail.log.fs import LOCAL
from tests.chance import SEED
from tests.crash.compactions import Expected, Log, LogDir, expect, find, judge
from tests.crash.driver import SOAK, few_in_check
from tests.crash.explorer import Explorer, Visit
from tests.crash.test_compaction import SHAPES, NextRuns, check_next_run, digest_after_a_run, shape
from tests.interop.conftest import fast_dir  # noqa: F401

IN_CHECK = "one segment, the active one"
ROLLED = {
    IN_CHECK: LogDir((Log("orders-0", [["a:1 b:1", "a:2 c:1", "b:-"]]),)),
    "the tombstone of an earlier segment's value, and its transaction": LogDir(
        (Log("orders-0", [["T1 a:1", "b:1"], ["C1", "T1 a:2 b:2", "A1", "! b:-", "@2 c:1"]]),), join=2
    ),
    "partitions that share a checkpoint file": LogDir(
        (
            Log("orders-0", [["a:1 b:1"], ["a:2"]], checkpoint=2),
            Log("orders-1", [["a:1", "a:2"], []]),
            Log("other-0", [["a:1"], ["a:2"]], compacted=False),
        )
    ),
}
DRAWN = [name for name in (*ROLLED, *(name for name in SHAPES if name not in ROLLED), "random 0") if name != IN_CHECK]
NAMES = few_in_check([IN_CHECK, *DRAWN], IN_CHECK, drawn=() if SOAK else DRAWN)


def rolled(name: str) -> LogDir:
    given = ROLLED[name] if name in ROLLED else shape(name)
    return LogDir(given.logs, join=given.join, rolls=True)


def explorer_of(name: str, log_dir: LogDir, work_dir: Path, seen: list[bool]) -> Explorer:
    undisturbed, settled = digest_after_a_run(log_dir, work_dir / "undisturbed"), NextRuns()

    def visit(state: Visit) -> None:
        judge(log_dir, state.found, state.run, ended=state.ended)
        logs = state.found.logs
        seen.append(any(log.end in logs[log.name].segments and log.end not in log.segments for log in log_dir.logs))
        check_next_run(log_dir, state, undisturbed, settled)

    return Explorer(log_dir, work_dir, visit, SEED, soak=SOAK, partial_cuts=8 if SOAK else 1)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_stop_of_a_compaction_with_a_roll_loses_no_record(
    name: str,
    fast_dir: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    log_dir, seen = rolled(name), list[bool]()
    explorer = explorer_of(name, log_dir, fast_dir, seen)
    explorer.first.protocol = "compaction that rolls the active segment"
    explorer.explore()
    with capsys.disabled():
        print(f"\n{name} (seed {SEED}): {explorer}; losses 0")
    if name in ROLLED:
        assert True in seen and False in seen


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_fault_of_a_compaction_with_a_roll_loses_no_record(
    name: str,
    fast_dir: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    explorer = explorer_of(name, rolled(name), fast_dir, [])
    explorer.first.protocol = "compaction that rolls the active segment"
    explorer.explore_faults()
    with capsys.disabled():
        print(f"\n{name} (seed {SEED}): {explorer.first}; in recoveries {explorer.recoveries}; losses 0")


def test_an_open_transaction_in_the_active_segment_prevents_the_roll(tmp_path: Path) -> None:
    log_dir = LogDir((Log("orders-0", [["a:1 b:1", "a:2"], ["a:3", "T1 b:2"]]),), rolls=True)
    log_dir.make(tmp_path / "d")
    start = find(log_dir, tmp_path / "d")
    expected: Expected = expect(log_dir, start)
    log_dir.run(LOCAL, tmp_path / "d")
    found = find(log_dir, tmp_path / "d")
    judge(log_dir, found, expected, ended=True)
    assert max(found.logs["orders-0"].segments) == 3
