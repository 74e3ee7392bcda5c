"""Appending to a log, compared with a list of batches: any sequence of operations, and the refusals of each."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from keytail.errors import CorruptLog, KeytailError, Refused, UsageProblem
from keytail.log.append.partition_log import Closed, PartitionLog
from keytail.log.append.rolling import AppendConfig
from keytail.log.fs import LOCAL, FileSystem
from tests.chance import draws
from tests.interop.conftest import fast_dir  # noqa: F401
from tests.log.invariants import check_log
from tests.reference.batches import Rec, decode_log, encode_batch, encode_marker

NOW_MS = 1_700_000_000_000
CONFIG = AppendConfig(segment_bytes=1000, index_bytes=240, index_interval_bytes=100)
STATEFUL = settings(
    max_examples=draws(25), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def batch(count: int = 2, base: int = 0, **fields: int) -> bytes:
    return encode_batch([Rec(base + i, NOW_MS, b"k%d" % i, b"v" * 9) for i in range(count)], **fields)  # type: ignore[arg-type]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "orders-0"
    path.mkdir()
    return path


def opened(directory: Path, config: AppendConfig = CONFIG, fs: FileSystem = LOCAL) -> PartitionLog:
    return PartitionLog.open(str(directory), config, now_ms=NOW_MS, fs=fs)


class LogModel(RuleBasedStateMachine):
    """The model of a log. `spans` has the base and last offset of every batch, `starts` the base offsets of segments
    begun by explicit rolls.
    """

    parent: Path

    @initialize(segment_bytes=st.sampled_from([200, 500, 5000]), index_bytes=st.sampled_from([12, 36, 4000]),
                preallocate=st.booleans())  # fmt: skip
    def create(self, segment_bytes: int, index_bytes: int, preallocate: bool) -> None:
        self.root = Path(tempfile.mkdtemp(dir=self.parent))
        (self.root / "orders-0").mkdir()
        self.config = AppendConfig(
            segment_bytes=segment_bytes, index_bytes=index_bytes, index_interval_bytes=60, preallocate=preallocate
        )
        self.log = opened(self.root / "orders-0", self.config)
        self.spans: list[tuple[int, int, int]] = []
        self.end = self.epoch = 0

    def teardown(self) -> None:
        if hasattr(self, "root"):
            self.log.abandon()
            shutil.rmtree(self.root)

    @rule(counts=st.lists(st.integers(1, 3), min_size=1, max_size=12), newer=st.booleans())
    def append(self, counts: list[int], newer: bool) -> None:
        self.epoch += newer
        appended = self.log.append(b"".join(map(batch, counts)), leader_epoch=self.epoch, now_ms=NOW_MS)
        assert (appended.first_offset, appended.batches) == (self.end, len(counts))
        for count in counts:
            self.spans.append((self.end, self.end + count - 1, self.epoch))
            self.end += count

    @rule(gap=st.sampled_from([0, 3, 2**31]))
    def append_as_follower(self, gap: int) -> None:
        data = batch(2, self.end + gap, leader_epoch=self.epoch)
        self.log.append_as_follower(data, now_ms=NOW_MS)
        self.spans.append((self.end + gap, self.end + gap + 1, self.epoch))
        self.end += gap + 2

    @rule()
    def roll(self) -> None:
        assert self.log.roll(now_ms=NOW_MS) == self.end

    @rule()
    def flush(self) -> None:
        self.log.flush(now_ms=NOW_MS)
        assert self.log.recovery_point >= self.end

    @rule()
    def restart(self) -> None:
        closed = self.log.close()
        assert closed == Closed(self.end, max(self.end, closed.recovery_point), None)
        for path in (self.root / "orders-0").glob("*.log"):
            decode_log(path.read_bytes())  # nothing follows the last batch
        self.log = opened(self.root / "orders-0", self.config)

    @invariant()
    def equals_the_list(self) -> None:
        if not hasattr(self, "log"):
            return
        check_log(self.log)
        assert self.log.log_end_offset == self.end
        found = []
        for base in self.log.segments:
            log = (self.root / "orders-0" / f"{base:020d}.log").read_bytes()
            log = log[: self.log.active.size_bytes] if base == self.log.segments[-1] else log
            assert len(log) <= self.config.segment_bytes
            batches = decode_log(log)
            assert all(base <= b.base_offset for b in batches)
            found += [(b.base_offset, b.last_offset, b.leader_epoch) for b in batches]
        assert found == self.spans
        for first, last, _ in self.spans[-3:]:
            base, entry = self.log.floor(last)
            assert base == max(b for b in self.log.segments if b <= first)
            assert entry.slot < 0 or entry.offset <= last


def test_operations_on_a_log_equal_those_on_a_list_of_batches(fast_dir: Path) -> None:  # noqa: F811
    class Model(LogModel):
        parent = fast_dir

    run_state_machine_as_test(Model, settings=STATEFUL)


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


PRODUCER = {"producer_id": 7, "producer_epoch": 1}
REFUSED_BY_A_LEADER = {
    "nothing": (b"", UsageProblem, "no batch to append: a set must have at least one"),
    "too large": (batch(30), Refused, "larger than 600 bytes"),
    "damaged": (batch()[:-1] + b"!", CorruptLog, "invalid CRC"),
    "truncated": (batch() + batch()[:-5], CorruptLog, "bytes after the last complete batch are not a batch"),
    "old format": (batch()[:16] + b"\1" + batch()[17:], Refused, "message format is old"),
    "gaps": (encode_batch([Rec(0, 1, b"k", b"v"), Rec(5, 1, b"k", b"v")]), Refused, "number of records differs"),
    "append time": (encode_batch([Rec(0, 1, b"k", b"v")], timestamp_type=1), Refused, "LogAppendTime"),
    "no sequence": (batch(**PRODUCER), Refused, "no sequence number"),
    "out of sequence": (batch(**PRODUCER, base_sequence=3), Refused, "sequence 3 does not follow 1"),
    "old epoch": (batch(producer_id=7, producer_epoch=0, base_sequence=2), Refused, "older than the current epoch 1"),
    "new epoch": (batch(producer_id=7, producer_epoch=2, base_sequence=1), Refused, "begins with sequence 1, not 0"),
    "old marker": (encode_marker(0, 1, commit=True, producer_id=7, producer_epoch=0), Refused, "older than"),
    "second of two": (batch() + batch(**PRODUCER, base_sequence=9), Refused, "does not follow"),
}


@pytest.mark.parametrize("case", REFUSED_BY_A_LEADER)
def test_a_batch_that_a_leader_refuses_changes_nothing(case: str, directory: Path) -> None:
    data, kind, match = REFUSED_BY_A_LEADER[case]
    config = AppendConfig(**{**vars(CONFIG), "max_message_bytes": 600})
    with opened(directory, config) as log:
        log.append(batch(**PRODUCER, base_sequence=0), leader_epoch=0, now_ms=NOW_MS)
        before = files(directory)
        with pytest.raises(kind, match=match):
            log.append(data, leader_epoch=0, now_ms=NOW_MS)
        assert files(directory) == before
        check_log(log)
        # valid batches are still appended
        log.append(batch(**PRODUCER, base_sequence=2), leader_epoch=0, now_ms=NOW_MS)
        assert log.log_end_offset == 4


@pytest.mark.parametrize(
    ("data", "kind", "match"),
    [
        (batch(2, 1), Refused, "below the log end offset"),
        (batch(2, 5) + batch(2, 6), Refused, "below the end of the previous batch"),
        (batch(2, 5, leader_epoch=-1), Refused, "no leader epoch"),
        (b"".join(batch(1, 5 + i) for i in range(15)), Refused, "larger than the segment size"),
        (batch(1, 5) + batch(1, 5 + 2**31), Refused, "more offsets than a segment can hold"),
    ],
)
def test_a_batch_that_a_follower_refuses_changes_nothing(data: bytes, kind: type, match: str, directory: Path) -> None:
    with opened(directory) as log:
        log.append(batch(), leader_epoch=0, now_ms=NOW_MS)
        before = files(directory)
        with pytest.raises(kind, match=match):
            log.append_as_follower(data, now_ms=NOW_MS)
        assert files(directory) == before


def test_a_set_with_more_entries_than_fit_is_refused_before_it_is_written(directory: Path) -> None:
    config = AppendConfig(segment_bytes=100_000, index_bytes=40, index_interval_bytes=0)
    with opened(directory, config) as log:
        before = files(directory)
        with pytest.raises(Refused, match="more index entries"):
            log.append_as_follower(b"".join(batch(1, i) for i in range(20)), now_ms=NOW_MS)
        assert files(directory) == before
        log.append(batch(1) * 20, leader_epoch=0, now_ms=NOW_MS)  # batches from a leader are appended as separate sets
        assert len(log.segments) > 2


def test_batches_above_the_leader_epoch_of_a_follower_are_ignored(directory: Path) -> None:
    with opened(directory) as log:
        data = batch(1, 0, leader_epoch=3) + batch(1, 1, leader_epoch=4) + batch(1, 2, leader_epoch=3)
        assert log.append_as_follower(data, leader_epoch=3, now_ms=NOW_MS).batches == 1
        assert log.append_as_follower(batch(1, 1, leader_epoch=4), leader_epoch=3, now_ms=NOW_MS).batches == 0
        assert (log.log_end_offset, log.leader_epochs) == (1, ((3, 0),))


def test_a_batch_that_a_producer_sends_again_is_stored_once(directory: Path) -> None:
    sent = [batch(**PRODUCER, base_sequence=2 * i) for i in range(7)]
    with opened(directory) as log:
        log.append(b"".join(sent), leader_epoch=0, now_ms=NOW_MS)
        appended = log.append(sent[2] + batch() + sent[6], leader_epoch=0, now_ms=NOW_MS)
        assert [same.first_offset for same in appended.duplicates] == [4, 12]
        assert (appended.first_offset, appended.last_offset, appended.batches) == (14, 15, 1)
        with pytest.raises(Refused, match="sequence 2 does not follow 13"):
            log.append(sent[1], leader_epoch=0, now_ms=NOW_MS)  # five other batches were sent since


def test_the_same_sequence_numbers_in_a_new_epoch_are_a_new_batch(directory: Path) -> None:
    with opened(directory) as log:
        log.append(batch(**PRODUCER, base_sequence=0), leader_epoch=0, now_ms=NOW_MS)
        appended = log.append(batch(producer_id=7, producer_epoch=2, base_sequence=0), leader_epoch=0, now_ms=NOW_MS)
        assert (appended.first_offset, appended.duplicates) == (2, ())
        with pytest.raises(Refused, match="older than the current epoch 2"):
            log.append(batch(**PRODUCER, base_sequence=0), leader_epoch=0, now_ms=NOW_MS)


def test_no_other_batch_of_a_producer_is_appended_within_its_open_transaction(directory: Path) -> None:
    with opened(directory) as log:
        first = batch(**PRODUCER, base_sequence=0, transactional=True)
        log.append(first, leader_epoch=0, now_ms=NOW_MS)
        outside = batch(2, 2, **PRODUCER, base_sequence=2, leader_epoch=0)
        with pytest.raises(Refused, match="not part of the transaction that begins at offset 0"):
            log.append(outside, leader_epoch=0, now_ms=NOW_MS)
        with pytest.raises(Refused, match="not part of the transaction that begins at offset 0"):
            log.append_as_follower(outside, now_ms=NOW_MS)
        assert log.append(first, leader_epoch=0, now_ms=NOW_MS).duplicates
        log.append(encode_marker(0, 1, commit=True, **PRODUCER), leader_epoch=0, now_ms=NOW_MS)
        log.append(outside, leader_epoch=0, now_ms=NOW_MS)


def test_batches_appended_together_leave_the_files_of_batches_appended_one_by_one(
    directory: Path, tmp_path: Path
) -> None:
    """The snapshots written at rolls are also equal."""
    sent = [batch(producer_id=i % 3, producer_epoch=0, base_sequence=2 * (i // 3)) for i in range(30)]
    other = tmp_path / "other-0"
    other.mkdir()
    with opened(directory) as at_once, opened(other) as one_by_one:
        at_once.append(b"".join(sent), leader_epoch=0, now_ms=NOW_MS)
        for data in sent:
            one_by_one.append(data, leader_epoch=0, now_ms=NOW_MS)
        assert len(at_once.segments) > 2
        assert files(directory) == files(other)


@pytest.mark.parametrize(("last", "following"), [(2**31 - 2, 0), (2**31 - 1, 1)])
def test_sequence_numbers_wrap_around(last: int, following: int, directory: Path) -> None:
    """The sequence number 2147483647 is the last or the first one of a batch of two records."""
    with opened(directory) as log:
        log.append(batch(**PRODUCER, base_sequence=last), leader_epoch=0, now_ms=NOW_MS)
        log.append(batch(**PRODUCER, base_sequence=following), leader_epoch=0, now_ms=NOW_MS)
        assert log.append(batch(**PRODUCER, base_sequence=last), leader_epoch=0, now_ms=NOW_MS).duplicates
    with opened(directory) as log:
        same = batch(**PRODUCER, base_sequence=following)
        assert log.append(same, leader_epoch=0, now_ms=NOW_MS).duplicates[0].first_offset == 2


def test_a_failing_disk_closes_the_log(directory: Path) -> None:
    class Full(FileSystem):
        fails = False

        def write_at(self, fd: int, buffer: object, position: int) -> int:
            if self.fails:
                raise OSError(28, "No space left on device")
            return super().write_at(fd, buffer, position)

    fs = Full()
    log = opened(directory, fs=fs)
    log.append(batch(), leader_epoch=0, now_ms=NOW_MS)
    fs.fails = True
    with pytest.raises(OSError, match="No space"):
        log.append(batch(), leader_epoch=0, now_ms=NOW_MS)
    fs.fails = False
    with pytest.raises(KeytailError, match="accepts no more batches"):
        log.append(batch(), leader_epoch=0, now_ms=NOW_MS)
    with pytest.raises(KeytailError, match="accepts no more batches"):
        log.close()
    log.abandon()
    with pytest.raises(Refused, match="cannot append to this log"):
        opened(directory)


def test_a_flush_follows_after_a_number_of_messages_or_a_time(directory: Path) -> None:
    config = AppendConfig(**{**vars(CONFIG), "flush_messages": 4, "flush_ms": 100})
    with opened(directory, config) as log:
        log.append(batch(), leader_epoch=0, now_ms=NOW_MS)
        assert log.recovery_point == 0
        log.append(batch(), leader_epoch=0, now_ms=NOW_MS)
        assert log.recovery_point == 4
        log.append(batch(), leader_epoch=0, now_ms=NOW_MS)
        assert not log.flush_if_due(NOW_MS + 99)
        assert log.flush_if_due(NOW_MS + 100)
        assert log.recovery_point == 6
        log.flush(now_ms=NOW_MS + 150)  # nothing is left to flush, so the time does not matter
        log.append(batch(1), leader_epoch=0, now_ms=NOW_MS + 150)
        assert log.flush_if_due(NOW_MS + 200)


def test_files_are_synced_in_the_documented_order(directory: Path) -> None:
    """The order is that of APPEND.md, "The order of operations"."""

    class Synced(FileSystem):
        def fsync(self, fd: int) -> None:
            synced.append(Path(f"/proc/self/fd/{fd}").readlink().suffix)
            super().fsync(fd)

        def fsync_dir(self, path: str) -> None:
            synced.append("directory")
            super().fsync_dir(path)

    synced: list[str] = []
    with opened(directory, fs=Synced()) as log:
        log.append(batch(), leader_epoch=0, now_ms=NOW_MS)
        synced.clear()
        log.flush(now_ms=NOW_MS)
        assert synced == [".log", ".index", ".timeindex"]
        synced.clear()
        log.flush(now_ms=NOW_MS)
        assert synced == []
        log.roll(now_ms=NOW_MS)
        assert synced == [".log", ".index", ".timeindex", ".snapshot", "directory"]
        log.append(batch(**PRODUCER, base_sequence=0, transactional=True), leader_epoch=0, now_ms=NOW_MS)
        log.append(encode_marker(0, 1, commit=False, **PRODUCER), leader_epoch=0, now_ms=NOW_MS)
        synced.clear()
        log.flush(now_ms=NOW_MS)
        assert synced == [".log", ".index", ".timeindex", ".txnindex"]
        log.append(batch(20), leader_epoch=0, now_ms=NOW_MS)
        synced.clear()
        log.append(batch(20), leader_epoch=1, now_ms=NOW_MS)
        assert synced == [".tmp", "directory", ".log", ".index", ".timeindex", ".txnindex", ".snapshot", "directory"]
        synced.clear()
        log.append_as_follower(batch(40, log.log_end_offset, leader_epoch=2), now_ms=NOW_MS)
        assert synced == [".tmp", "directory", ".log", ".index", ".timeindex", ".snapshot", "directory"]
        log.roll(now_ms=NOW_MS)
        synced.clear()
    assert synced == [".log", ".index", ".timeindex", "directory"], (
        "the snapshot of the roll has the same state, and is not written again"
    )


def test_only_a_log_that_was_closed_is_opened(directory: Path) -> None:
    with opened(directory) as log:
        log.append(batch(), leader_epoch=0, now_ms=NOW_MS)
    for name in ("00000000000000000000.index", "00000000000000000000.timeindex", "00000000000000000002.snapshot"):
        data = (directory / name).read_bytes()
        (directory / name).unlink()
        with pytest.raises(Refused, match="cannot append to this log"):
            opened(directory)
        (directory / name).write_bytes(data)
    claim = directory.parent / ".kafka_cleanshutdown"
    claim.write_text("{}")
    with pytest.raises(Refused, match=r"clean shutdown.*\[clean-shutdown-file-exists\]"):
        opened(directory)
    claim.unlink()
    opened(directory).close()


def test_idle_producers_expire_at_the_next_start(directory: Path) -> None:
    first = batch(1, **PRODUCER, base_sequence=0)
    with opened(directory) as log:
        log.append(first, leader_epoch=0, now_ms=NOW_MS)
    before = files(directory)
    later_ms = NOW_MS + CONFIG.producer_id_expiration_ms
    with PartitionLog.open(str(directory), CONFIG, now_ms=later_ms - 1) as log:
        assert log.append(first, leader_epoch=0, now_ms=later_ms - 1).duplicates
    PartitionLog.open(str(directory), CONFIG, now_ms=later_ms).close()
    assert files(directory) == before, "the snapshot must still have the producer"
    with PartitionLog.open(str(directory), CONFIG, now_ms=later_ms) as log:
        assert not log.append(first, leader_epoch=0, now_ms=later_ms).duplicates


def _add(path: Path, data: bytes) -> None:
    path.write_bytes((path.read_bytes() if path.exists() else b"") + data)


NOT_CLOSED = {
    "tail": ("00000000000000000000.log", b"tail", "bytes after the last batch are not a batch"),
    "leftover": ("00000000000000000000.log.swap", b"", "a replacement of segments was interrupted"),
    "scratch": ("00000000000000000000.log.cleaned", b"", "left from an unfinished operation"),
    "damaged snapshot": ("00000000000000000002.snapshot", b"!", "no valid producer snapshot at the log end offset 2"),
    "snapshot above the log end": ("00000000000000000009.snapshot", b"", "or there is a snapshot above it"),
    "damaged epochs": ("leader-epoch-checkpoint", b"?", "cannot append to this log"),
}


@pytest.mark.parametrize("case", NOT_CLOSED)
def test_a_log_that_was_not_closed_is_refused(case: str, directory: Path) -> None:
    name, data, match = NOT_CLOSED[case]
    with opened(directory) as log:
        log.append(batch(), leader_epoch=0, now_ms=NOW_MS)
    _add(directory / name, data)
    before = files(directory)
    with pytest.raises(Refused, match=match):
        opened(directory)
    assert files(directory) == before


def test_a_log_that_ends_below_its_start_is_refused(directory: Path) -> None:
    with opened(directory) as log:
        log.append(batch(), leader_epoch=0, now_ms=NOW_MS)
    with pytest.raises(Refused, match="the log end offset 2 is below the log start offset 3"):
        PartitionLog.open(str(directory), CONFIG, now_ms=NOW_MS, log_start_offset=3)


@pytest.mark.parametrize("name", ["00000000000000000009.snapshot", "00000000000000000000.log.swap"])
def test_a_directory_with_files_of_a_log_is_not_opened_as_a_new_log(name: str, directory: Path) -> None:
    (directory / name).write_bytes(b"")
    with pytest.raises(Refused, match="files of a former segment"):
        opened(directory)


def test_epochs_of_an_empty_directory_are_truncated_to_the_new_log(directory: Path) -> None:
    (directory / "leader-epoch-checkpoint").write_text("0\n3\n0 0\n3 4\n7 9\n")
    with PartitionLog.open(str(directory), CONFIG, now_ms=NOW_MS, log_start_offset=5) as log:
        check_log(log)
        assert log.leader_epochs == ((3, 5),)


def test_a_read_begins_within_the_log(directory: Path) -> None:
    with PartitionLog.open(str(directory), CONFIG, now_ms=NOW_MS, log_start_offset=5) as log:
        log.append(batch(), leader_epoch=0, now_ms=NOW_MS)
        assert log.floor(5)[0] == log.floor(7)[0] == 5  # the next batch begins at 7
        for offset in (4, 8):
            with pytest.raises(Refused, match="the log contains offsets 5 to 6"):
                log.floor(offset)


def test_stray_files_are_replaced_by_those_of_a_new_segment(directory: Path) -> None:
    with opened(directory) as log:
        for suffix in ("index", "timeindex", "txnindex"):
            (directory / f"{2:020d}.{suffix}").write_bytes(b"stray" * 3)
        log.append(batch(), leader_epoch=0, now_ms=NOW_MS)
        log.roll(now_ms=NOW_MS)
        log.append(batch(), leader_epoch=0, now_ms=NOW_MS)
        check_log(log)
        assert not (directory / f"{2:020d}.txnindex").exists()
    opened(directory).close()


def test_an_append_does_not_change_the_given_bytes(directory: Path) -> None:
    data = np.frombuffer(batch(), np.uint8).copy()
    before = data.copy()
    with opened(directory) as log:
        log.append(data, leader_epoch=5, now_ms=NOW_MS)
        log.append(data, leader_epoch=5, now_ms=NOW_MS)
    assert np.array_equal(data, before)


def test_new_files_have_the_mode_of_the_log(directory: Path) -> None:
    opened(directory).close()
    (directory / f"{0:020d}.log").chmod(0o640)
    with opened(directory) as log:
        log.append(batch(), leader_epoch=0, now_ms=NOW_MS)
        log.roll(now_ms=NOW_MS)
    assert (directory / f"{2:020d}.log").stat().st_mode & 0o777 == 0o640


def test_empty_snapshots_are_written_if_the_log_start_is_the_log_end(directory: Path) -> None:
    """The snapshots are written at the bases of the last two segments and at the log end (APPEND.md, "Before a log is
    opened").
    """
    with opened(directory) as log:
        for _ in range(3):
            log.append(batch(), leader_epoch=0, now_ms=NOW_MS)
            log.roll(now_ms=NOW_MS)
        log.append(batch(), leader_epoch=0, now_ms=NOW_MS)
    for path in directory.glob("*.snapshot"):
        path.unlink()
    PartitionLog.open(str(directory), CONFIG, now_ms=NOW_MS, log_start_offset=8).close()
    assert sorted(int(path.stem) for path in directory.glob("*.snapshot")) == [4, 6, 8]
