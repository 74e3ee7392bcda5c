"""Stops before every file operation of `expire`, and makes each one fail. No data to be retained is lost, a broker
serves the log as before or as after the run, and the next run, or a broker, completes the removal. The states in the
table of EXPIRE.md are also tested.
"""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

import keytail.expire
from keytail.expire.ages import age_tasks, read_age
from keytail.expire.partition import Retention, age_candidates, decide, refusals, remove
from keytail.log.checkpoint import read_epochs, read_offsets
from keytail.log.fs import LOCAL, FileStat, FileSystem
from keytail.log.log_dirs import survey_log_dirs
from keytail.log.partition import PartitionFacts, survey_partition
from keytail.log.replacement.recover import recover
from tests.chance import SEED
from tests.crash.driver import Counts, Failed, State, for_every_fault, for_every_stop
from tests.crash.partitions import NO_PRODUCERS, PARTITION, log_of, offsets_of, txn_index, write_segment
from tests.interop.conftest import fast_dir, kafka  # noqa: F401
from tests.interop.kafka import Kafka
from tests.reference.loader import load

SEGMENTS = {0: range(10), 10: range(10, 20), 20: range(20, 30), 30: range(30, 34)}
END = 34
NOW_MS = 1_000_025  # the record at offset n has the timestamp 1,000,000 + n
BY_TIME = Retention(retention_ms=5)
UNLIMITED = Retention(retention_ms=-1)


@dataclass(frozen=True)
class Case:
    """A log dir, its retention, and the base offset of the first retained segment."""

    retention: Retention
    first: int
    log_start: int | None = None  # the log start offset in the checkpoint
    clean_shutdown: bool = True
    checkpoints: dict[str, int] = field(
        default_factory=lambda: {"replication-offset-checkpoint": END, "recovery-point-offset-checkpoint": END}
    )

    def make(self, root: Path) -> None:
        path = root / PARTITION
        path.mkdir(parents=True)
        for base, offsets in SEGMENTS.items():
            write_segment(path, base, log_of(offsets), "", txn_index(base + 3) if base in (0, 20) else None)
            if base:
                (path / f"{base:020d}.snapshot").write_bytes(NO_PRODUCERS)
        if self.clean_shutdown:
            (path / f"{END:020d}.snapshot").write_bytes(NO_PRODUCERS)
            (root / ".kafka_cleanshutdown").touch()
        (path / "leader-epoch-checkpoint").write_text("0\n3\n0 0\n2 12\n5 25\n")
        notes = dict(self.checkpoints)
        if self.log_start is not None:
            notes["log-start-offset-checkpoint"] = self.log_start
        for name, offset in notes.items():
            (root / name).write_text(f"0\n2\norders 0 {offset}\nother 1 3\n")

    @property
    def log_start_after(self) -> int:
        return max(self.first, self.log_start or 0)


CASES = {
    "by time": Case(BY_TIME, 20),
    "by size, an entry below": Case(Retention(retention_ms=-1, retention_bytes=len(log_of(range(20, 34)))), 20, 5),
    "by log start alone": Case(UNLIMITED, 20, 27),
    "all": Case(Retention(retention_ms=-1, retention_bytes=0), END),
    "after an unclean shutdown": Case(
        Retention(retention_ms=0), 20, None, False,
        {"replication-offset-checkpoint": END, "recovery-point-offset-checkpoint": 25},
    ),
}  # fmt: skip


def look(fs: FileSystem, root: Path) -> tuple[PartitionFacts, int | None]:
    [listing] = survey_log_dirs(fs, [str(root)])
    [entry] = listing.partitions
    return survey_partition(fs, listing, entry), listing.log_starts.get(("orders", 0))


def run(fs: FileSystem, root: Path, retention: Retention) -> Failed | None:
    """Run `expire` with `--execute` on a partition."""
    facts, _ = look(fs, root)
    if facts.leftovers:
        recover(fs, facts.path)
    facts, log_start = look(fs, root)
    if reasons := [*facts.problems, *refusals(facts, log_start)]:
        return Failed(tuple(reasons))
    tasks = age_tasks(facts, age_candidates(facts, retention), NOW_MS + 1000, retention.retention_ms)
    ages = {task.base_offset: read_age(fs, task) for task in tasks}
    now_ms = NOW_MS if retention.retention_ms else NOW_MS + 1000
    remove(fs, facts, decide(facts, retention, now_ms, ages))
    return None


def partition_files(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / PARTITION).iterdir() if not path.name.endswith(".tmp")}


def checkpoints(root: Path) -> dict[str, dict[tuple[str, int], int]]:
    return {path.name: read_offsets(LOCAL, str(path)) for path in sorted(root.glob("*-checkpoint"))}


def served(root: Path) -> tuple[int, list[int], int]:
    """Return the log start offset, the offsets of the records, and the log end offset that a broker serves after a
    start.
    """
    loaded = load(root / PARTITION)
    first = min(loaded.segments)
    start = max(read_offsets(LOCAL, str(root / "log-start-offset-checkpoint")).get(("orders", 0), 0), first)
    last = max(loaded.segments)
    end = max([last, *(offset + 1 for offset in offsets_of(loaded.segments[last].log))])
    records = [record.offset for record in loaded.records() if record.offset >= start]
    return start, records, end


@pytest.mark.parametrize("name", CASES)
def test_no_stop_or_fault_of_expire_loses_retained_data(
    name: str, fast_dir: Path, capsys: pytest.CaptureFixture[str]  # noqa: F811
) -> None:
    case = CASES[name]
    case.make(fast_dir / "origin")
    before = served(fast_dir / "origin")
    notes = checkpoints(fast_dir / "origin")
    case.make(fast_dir / "whole")
    run(LOCAL, fast_dir / "whole", case.retention)
    after, left = served(fast_dir / "whole"), partition_files(fast_dir / "whole")
    assert after == (case.log_start_after, list(range(case.log_start_after, END)), END)
    assert before == (case.log_start or 0, list(range(case.log_start or 0, END)), END)
    origin = partition_files(fast_dir / "origin")
    retained = {n: data for n, data in origin.items() if n[:20].isdigit() and int(n[:20]) >= case.first}
    assert retained.items() <= left.items()
    new = {f"{END:020d}{suffix}" for suffix in (".log", ".index", ".timeindex")} if case.first == END else set()
    assert left.keys() - retained.keys() == {"leader-epoch-checkpoint", *new}
    noted = {**notes.get("log-start-offset-checkpoint", {}), ("orders", 0): case.log_start_after}
    assert checkpoints(fast_dir / "whole") == notes | {"log-start-offset-checkpoint": noted}

    def check(state: State) -> None:
        found = served(state.root)
        if found[0] == before[0] != after[0]:
            assert found == before, "part of the log was removed before the log start offset was written"
        elif state.fault is not None and "ENOSPC" in str(state.fault) and found != after:
            # On a full disk, the oldest segment is removed first.
            start = max(10, case.log_start or 0)
            assert found == (start, list(range(start, END)), END)
            if case.log_start is not None and case.log_start < 10:
                return
        else:
            assert found == after
        files = partition_files(state.root)
        assert retained.items() <= files.items(), "a retained file has changed"
        if state.action_ended:
            assert files == left
        # If the log start offset was written, the next run completes the removal without any retention.
        retention = UNLIMITED if found[0] == after[0] != before[0] else case.retention
        assert run(LOCAL, state.root, retention) is None
        assert partition_files(state.root) == left
        assert served(state.root) == after
        assert checkpoints(state.root) == checkpoints(fast_dir / "whole")

    def action(fs: FileSystem, root: Path) -> Failed | None:
        return run(fs, root, case.retention)

    counts = Counts("expiry of segments")
    for_every_stop(case.make, action, check, work_dir=fast_dir / "stops", counts=counts, partial_cuts=2)
    for_every_fault(case.make, action, check, work_dir=fast_dir / "faults", counts=counts, share=0.1, seed=SEED)
    with capsys.disabled():
        print(f"\nexpire, {name}: {counts}")
    assert counts.distinct_states > 8


@pytest.mark.parametrize("name", ["by time", "by size, an entry below", "all"])
def test_on_a_full_disk_the_oldest_segment_is_removed_first(name: str, tmp_path: Path) -> None:
    """No file can be created or written until a file has been removed."""
    case = CASES[name]
    for root in (tmp_path / "roomy", tmp_path / "full"):
        case.make(root)
    run(LOCAL, tmp_path / "roomy", case.retention)
    fs = FullDisk()
    assert run(fs, tmp_path / "full", case.retention) is None
    assert fs.refused == 1
    assert served(tmp_path / "full") == served(tmp_path / "roomy")
    assert partition_files(tmp_path / "full") == partition_files(tmp_path / "roomy")
    assert checkpoints(tmp_path / "full") == checkpoints(tmp_path / "roomy")


class FullDisk(FileSystem):
    """A file system without space for new data until a `.log` file is removed."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = 0
        self._full = True

    def create(self, path: str, like: FileStat | None) -> int:
        if self._full:
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device", path)
        return super().create(path, like)

    def unlink(self, path: str) -> None:
        super().unlink(path)
        self._full = self._full and ".log" not in path


@pytest.mark.interop
@pytest.mark.parametrize("name", ["by time", "all"])
def test_kafka_starts_after_every_stop(name: str, kafka: Kafka, fast_dir: Path) -> None:  # noqa: F811
    """Kafka's loader finds the log as it was before or is after the run; Kafka's retention completes the removal."""
    case = CASES[name]

    def check(state: State) -> None:
        start, offsets, end = served(state.root)
        copy = fast_dir / "kafka" / PARTITION
        shutil.copytree(state.root / PARTITION, copy)
        loaded = kafka.load(copy, log_start_offset=start, fetch=True, configs={"index.interval.bytes": 50})
        assert (loaded.log_start_offset, loaded.log_end_offset, loaded.fetch_mismatches) == (start, end, ())
        assert [record.offset for record in loaded.records if record.offset >= start] == offsets
        if start == case.log_start_after:
            left = kafka.expire(copy, log_start_offset=start, configs={"cleanup.policy": "compact"})
            assert (left.segment_bases[0], left.log_start_offset) == (case.first, start)
        shutil.rmtree(copy.parent)

    for_every_stop(
        case.make, lambda fs, root: run(fs, root, case.retention), check,
        work_dir=fast_dir / "stops", counts=Counts(), partial_cuts=1,
    )  # fmt: skip


def note_log_start(root: Path) -> None:
    (root / "log-start-offset-checkpoint").write_text("0\n1\norders 0 20\n")


def drop(root: Path, base: int, *suffixes: str) -> None:
    for suffix in suffixes:
        (root / PARTITION / f"{base:020d}{suffix}").unlink(missing_ok=True)


SEGMENT = (".log", ".index", ".timeindex", ".txnindex")


def row_1(root: Path) -> None:
    pass


def row_2(root: Path) -> None:
    note_log_start(root)


def row_3(root: Path) -> None:
    note_log_start(root)
    drop(root, 0, ".log")


def row_4(root: Path) -> None:
    note_log_start(root)
    drop(root, 10, *SEGMENT, ".snapshot")


def row_5(root: Path) -> None:
    note_log_start(root)
    drop(root, 0, *SEGMENT)
    drop(root, 10, *SEGMENT)


def row_6(root: Path) -> None:
    note_log_start(root)
    log = root / PARTITION / f"{0:020d}.log"
    log.rename(f"{log}.deleted")


def row_7(root: Path) -> None:
    run(LOCAL, root, BY_TIME)


# For each row, the function that creates the state, and the log start offset of a broker that starts on it.
ROWS: dict[int, tuple[Callable[[Path], None], int]] = {
    1: (row_1, 0), 2: (row_2, 20), 3: (row_3, 20), 4: (row_4, 20), 5: (row_5, 20), 6: (row_6, 20), 7: (row_7, 20),
}  # fmt: skip


def test_each_row_of_the_table_has_a_test() -> None:
    page = (Path(next(iter(keytail.expire.__path__))) / "EXPIRE.md").read_text()
    found = re.findall(r"^\| (\d+) \| .* \| (\d+)[,;]?.* \| .* \|$", page, re.MULTILINE)
    assert [(int(number), int(start)) for number, start in found] == [(n, start) for n, (_, start) in ROWS.items()]


@pytest.mark.parametrize("number", ROWS)
def test_each_state_of_the_table_is_resolved(number: int, tmp_path: Path) -> None:
    case, (build, start) = CASES["by time"], ROWS[number]
    case.make(tmp_path / "whole")
    run(LOCAL, tmp_path / "whole", case.retention)
    case.make(tmp_path / "d")
    build(tmp_path / "d")
    assert served(tmp_path / "d") == (start, list(range(start, END)), END)
    assert run(LOCAL, tmp_path / "d", UNLIMITED if number > 1 else case.retention) is None
    assert partition_files(tmp_path / "d") == partition_files(tmp_path / "whole")
    assert read_epochs(LOCAL, str(tmp_path / "d" / PARTITION / "leader-epoch-checkpoint")) == [(2, 20), (5, 25)]


def test_the_next_run_completes_an_expire_of_a_compacted_topic(tmp_path: Path) -> None:
    case = CASES["by time"]
    case.make(tmp_path / "d")
    row_2(tmp_path / "d")
    run(LOCAL, tmp_path / "d", replace(UNLIMITED, cleanup_policy=frozenset({"compact"})))
    assert served(tmp_path / "d")[0] == 20
    assert not (tmp_path / "d" / PARTITION / f"{0:020d}.log").exists()
