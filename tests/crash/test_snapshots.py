"""Stops before every file operation that rebuilds a snapshot or leader epochs: the file is the old one or the new one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from keytail.format.producers import ProducerEntry, encode_snapshot
from keytail.log.fs import FileSystem
from keytail.rebuild_index.epochs import plan_epochs, write_plan
from keytail.rebuild_index.snapshots import put_snapshot
from tests.crash.driver import Counts, State, for_every_stop_and_fault
from tests.crash.partitions import PARTITION, log_of, write_segment

NEW = encode_snapshot([ProducerEntry(pid, 0, 1, 8, 0, 1_700_000_000_000, -1, -1) for pid in range(50)])
SNAPSHOT, EPOCHS = f"{10:020d}.snapshot", "leader-epoch-checkpoint"


@pytest.mark.parametrize("old", [None, NEW[:-3]], ids=["missing", "damaged"])
def test_a_snapshot_is_unchanged_or_complete(old: bytes | None, tmp_path: Path) -> None:
    def make(root: Path) -> None:
        (root / PARTITION).mkdir(parents=True)
        write_segment(root / PARTITION, 10, log_of(range(10, 14)), "")
        if old is not None:
            (root / PARTITION / SNAPSHOT).write_bytes(old)

    def action(fs: FileSystem, root: Path, run_id: str = "r") -> None:
        path = str(root / PARTITION)
        put_snapshot(fs, path, 10, NEW, like=fs.stat(f"{path}/{10:020d}.log"), run_id=run_id, attempt="a")

    def again(fs: FileSystem, root: Path) -> None:
        action(fs, root, "r2")

    _explore(make, action, again, SNAPSHOT, old, NEW, tmp_path)


@pytest.mark.parametrize("old", [None, b"0\n2\n0 0\n3 90\n"], ids=["missing", "with one too many"])
def test_leader_epochs_are_unchanged_or_complete(old: bytes | None, tmp_path: Path) -> None:
    def make(root: Path) -> None:
        (root / PARTITION).mkdir(parents=True)
        if old is not None:
            (root / PARTITION / EPOCHS).write_bytes(old)

    def action(fs: FileSystem, root: Path) -> None:
        write_plan(fs, str(root / PARTITION), plan_epochs([(0, 0), (3, 90)] if old else [], [(0, 0), (2, 40)], 60))

    _explore(make, action, action, EPOCHS, old, b"0\n2\n0 0\n2 40\n", tmp_path)


def _explore(make, action, again, name: str, old: bytes | None, new: bytes, work_dir: Path) -> None:
    counts = Counts("snapshots and leader epochs")

    def check(state: State) -> None:
        path = state.root / PARTITION / name
        found = path.read_bytes() if path.exists() else None
        assert found in ((new,) if state.action_ended else (old, new))

    for_every_stop_and_fault(
        make, action, check, again=again, work_dir=work_dir / "work", counts=counts, partial_cuts=3,
        scratch=(".clean", ".tmp"),
    )  # fmt: skip
    assert counts.distinct_states >= 4
