"""Stops before every file operation of a truncation: after a recovery by a broker, the log is the same as after another
run of keytail. The states in the table of TAIL.md are also tested.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import keytail.rebuild_index
from keytail.log.fs import LOCAL, FileSystem
from keytail.rebuild_index.tail import TornTail, truncate_tail
from tests.chance import SEED
from tests.crash.driver import Counts, State, for_every_fault, for_every_stop
from tests.crash.partitions import PARTITION, log_of
from tests.rebuild_index.torn import (
    AFTER,
    CHECKPOINTS,
    HOSTED,
    Torn,
    checkpoints_of,
    facts_of,
    find,
    logs_of,
    plan,
    torn_logs,
    truncate,
)

SHARE = 0.3
CUT = {0: log_of(range(10)), 10: log_of(range(10, 15))}
HOLE = {**CUT, 20: log_of(range(20, 30)), 30: log_of(range(30, 34))}
CASES = {
    "segments after it": Torn(),
    "in the last segment": Torn({base: log for base, log in torn_logs().items() if base <= 10}, (10, 15)),
    "nothing of the segment is valid": Torn({**torn_logs(), 10: bytes(400)}, (10, 20), {**CHECKPOINTS, **{
        "recovery-point-offset-checkpoint": 10}}),
}  # fmt: skip


def truncate_as_found(fs: FileSystem, root: Path, tail: TornTail | None) -> None:
    truncate_tail(fs, facts_of(root), plan(root, tail), hosted=HOSTED)


def files_of(root: Path) -> set[str]:
    return {path.name for path in (root / PARTITION).iterdir()}


@pytest.mark.parametrize("case", CASES)
def test_after_every_stop_of_a_truncation_the_log_is_the_same(case: str, tmp_path: Path) -> None:
    torn = CASES[case]
    torn.make(tmp_path / "origin")
    expected = torn.recovered(tmp_path / "origin")
    assert expected != torn.logs
    torn.make(tmp_path / "whole")
    truncate(LOCAL, tmp_path / "whole")
    left, after = files_of(tmp_path / "whole"), checkpoints_of(tmp_path / "whole")
    counts = Counts("truncation of a torn tail")

    def check(state: State) -> None:
        assert torn.recovered(state.root) == expected, "a broker recovered another log"
        found = checkpoints_of(state.root)
        was_truncated = logs_of(state.root)[10] == expected[10]
        assert not was_truncated or (found == after and files_of(state.root) == left), "the log was truncated too early"
        assert not state.action_ended or was_truncated
        truncate(LOCAL, state.root)
        assert logs_of(state.root) == expected
        assert files_of(state.root) - {"cleaner-offset-checkpoint.tmp"} == left
        assert checkpoints_of(state.root) == after

    for_every_stop(torn.make, truncate, check, work_dir=tmp_path / "work", counts=counts, partial_cuts=2)
    # Unlike a run, `find` treats unreadable data as torn, so only the truncation has faults. If the fsync of the
    # truncated log fails, the torn tail may exist again after a power cut; then it is truncated again.
    tail = find(tmp_path / "origin")
    for_every_fault(
        torn.make, lambda fs, root: truncate_as_found(fs, root, tail), check,
        work_dir=tmp_path / "faults", counts=counts, share=SHARE, scratch=(".tmp",), seed=SEED,
    )  # fmt: skip
    print(SEED, counts)
    assert counts.distinct_states > 10


def remove(root: Path, *file_names: str) -> None:
    for name in file_names:
        (root / PARTITION / name).unlink()


def segment(base: int) -> tuple[str, ...]:
    return tuple(f"{base:020d}{suffix}" for suffix in (".log", ".index", ".timeindex", ".snapshot"))


def row_1(root: Path) -> None:
    pass


def row_2(root: Path) -> None:
    for name, offset in AFTER.items():
        (root / name).write_text(f"0\n2\norders 0 {offset}\nother 1 3\n")


def row_3(root: Path) -> None:
    row_2(root)
    remove(root, *segment(30), f"{34:020d}.snapshot")


def row_4(root: Path) -> None:
    row_3(root)
    remove(root, f"{20:020d}.log")


def row_5(root: Path) -> None:
    row_3(root)
    remove(root, *segment(20))


def row_6(root: Path) -> None:
    row_5(root)
    remove(root, f"{10:020d}.index", f"{10:020d}.timeindex")


def row_7(root: Path) -> None:
    row_6(root)
    (root / PARTITION / f"{10:020d}.log").write_bytes(CUT[10])


def row_8(root: Path) -> None:
    remove(root, f"{10:020d}.index")


def row_9(root: Path) -> None:
    (root / PARTITION / f"{10:020d}.log").write_bytes(CUT[10])


# For each row, the function that creates the state, the log of a broker, and the result of keytail.
ROWS: dict[int, tuple[Callable[[Path], None], dict[int, bytes], dict[int, bytes]]] = {
    1: (row_1, CUT, CUT),
    2: (row_2, CUT, CUT),
    3: (row_3, CUT, CUT),
    4: (row_4, CUT, CUT),
    5: (row_5, CUT, CUT),
    6: (row_6, CUT, CUT),
    7: (row_7, CUT, CUT),
    8: (row_8, HOLE, CUT),
    9: (row_9, HOLE, HOLE),
}


def test_entries_of_unfinished_copies_retain_their_high_watermark(tmp_path: Path) -> None:
    Torn().make(tmp_path / "d")
    for name in ("cleaner-offset-checkpoint", "replication-offset-checkpoint"):
        (tmp_path / "d" / name).write_text("0\n2\norders 0 33\nother 2 7\n")
    truncate(LOCAL, tmp_path / "d", hosted=[("orders", 0)])
    assert (tmp_path / "d" / "cleaner-offset-checkpoint").read_text() == "0\n1\norders 0 10\n"
    assert (tmp_path / "d" / "replication-offset-checkpoint").read_text() == "0\n2\norders 0 15\nother 2 7\n"


def test_every_row_of_the_table_has_a_test() -> None:
    page = (Path(next(iter(keytail.rebuild_index.__path__))) / "TAIL.md").read_text()
    numbers = [int(number) for number in re.findall(r"^\| (\d+) \| .* \| .* \| .* \|$", page, re.MULTILINE)]
    assert numbers == list(ROWS)


@pytest.mark.parametrize("number", ROWS)
def test_each_row_of_the_table_is_resolved(number: int, tmp_path: Path) -> None:
    build, broker, keytail = ROWS[number]
    torn = Torn()
    torn.make(tmp_path / "d")
    build(tmp_path / "d")
    assert torn.recovered(tmp_path / "d") == broker
    shutil.copytree(tmp_path / "d", tmp_path / "again")
    assert (find(tmp_path / "again") is None) == (number in (7, 9))
    truncate(LOCAL, tmp_path / "again")
    assert logs_of(tmp_path / "again") == keytail
