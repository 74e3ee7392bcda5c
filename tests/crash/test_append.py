"""Stops before every file operation of appends, rolls, flushes and a close. After a recovery, a broker has all flushed
data, and a prefix of the rest (log/append/APPEND.md, "After a log was not closed").
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from keytail.errors import CorruptLog, KeytailError, Refused
from keytail.log.append.partition_log import PartitionLog
from keytail.log.append.rolling import AppendConfig
from keytail.log.checkpoint import read_epochs
from keytail.log.fs import LOCAL, FileSystem
from tests.chance import SEED
from tests.crash.driver import Counts, State, for_every_fault, for_every_stop
from tests.crash.partitions import PARTITION
from tests.crash.recorder import RecordingFileSystem
from tests.interop.conftest import fast_dir, kafka  # noqa: F401
from tests.interop.kafka import CLOCK_MS, Kafka
from tests.log.invariants import check_log
from tests.reference.batches import Rec, encode_batch, encode_marker
from tests.reference.recovery import recovered_logs

SHARE = 0.1
CONFIG = AppendConfig(segment_bytes=420, index_bytes=120, index_interval_bytes=50)


def _batch(n: int) -> bytes:
    records = [Rec(i, CLOCK_MS + n, b"k%d" % i, b"v" * 20) for i in range(2)]
    return encode_batch(records, producer_id=7, producer_epoch=0, base_sequence=2 * n, transactional=True)


def _traffic(fs: FileSystem, root: Path, config: AppendConfig, flushed: list[tuple[int, int]]) -> None:
    """Append, roll and flush. When all data is durable, (number of operations, log end offset) is appended to
    `flushed`.
    """

    def record_flushed(end: int) -> None:
        flushed.append((len(fs.operations) if isinstance(fs, RecordingFileSystem) else 0, end))

    flushed.clear()
    log = PartitionLog.open(str(root / PARTITION), config, now_ms=CLOCK_MS, fs=fs)
    try:
        for n in range(5):
            log.append(_batch(n), leader_epoch=n // 3, now_ms=CLOCK_MS)
            record_flushed(log.recovery_point)
            if n == 1:
                log.flush(now_ms=CLOCK_MS)
                record_flushed(log.recovery_point)
        marker = encode_marker(0, CLOCK_MS, commit=False, producer_id=7, producer_epoch=0)
        log.append(marker, leader_epoch=3, now_ms=CLOCK_MS)
        log.roll(now_ms=CLOCK_MS)
        record_flushed(log.recovery_point)
        log.append(_batch(5), leader_epoch=3, now_ms=CLOCK_MS)
        log.close()
        record_flushed(log.log_end_offset)
    except (OSError, KeytailError):
        with pytest.raises(KeytailError, match="accepts no more batches"):
            log.append(_batch(0), leader_epoch=3, now_ms=CLOCK_MS)
        raise
    finally:
        log.abandon()


def _whole(work_dir: Path, config: AppendConfig) -> bytes:
    (work_dir / PARTITION).mkdir(parents=True)
    _traffic(LOCAL, work_dir, config, [])
    return b"".join(path.read_bytes() for path in sorted((work_dir / PARTITION).glob("*.log")))


class Promises:
    """The checks of every state: by the model of Kafka's loader, no flushed data is lost, and keytail opens only
    correct logs.
    """

    def __init__(self, work_dir: Path, config: AppendConfig) -> None:
        self.config, self.whole = config, _whole(work_dir, config)
        self._flushed: list[tuple[int, int]] = []

    def action(self, fs: FileSystem, root: Path) -> None:
        _traffic(fs, root, self.config, self._flushed)

    def flushed_by(self, state: State) -> int:
        """Return the offset below which all data was durable when the action stopped."""
        return max((end for done, end in self._flushed if done <= len(state.operations)), default=0)

    def check(self, state: State) -> None:
        directory = state.root / PARTITION
        epochs = directory / "leader-epoch-checkpoint"
        if epochs.exists():
            read_epochs(LOCAL, str(epochs))
        has_logs = any(directory.glob("*.log"))
        logs = recovered_logs(directory, 0) if has_logs else {}
        found = b"".join(logs[base] for base in sorted(logs))
        assert self.whole.startswith(found), "the log is not a prefix of the appended data"
        flushed = self.flushed_by(state)
        assert _end(found) >= flushed, f"the log ends at {_end(found)}, but was flushed up to {flushed}"
        if state.action_ended:
            assert found == self.whole
            PartitionLog.open(str(directory), self.config, now_ms=CLOCK_MS).close()
        elif has_logs:
            try:  # some states are valid, like that of a closed log
                log = PartitionLog.open(str(directory), self.config, now_ms=CLOCK_MS)
            except (Refused, CorruptLog):
                return
            check_log(log)
            assert log.log_end_offset == _end(found)
            log.abandon()


def make_dir(root: Path) -> None:
    (root / PARTITION).mkdir(parents=True)


def test_a_broker_finds_all_flushed_data(fast_dir: Path) -> None:  # noqa: F811
    promises = Promises(fast_dir / "whole", AppendConfig(**{**vars(CONFIG), "preallocate": True}))
    counts = Counts("append")
    for_every_stop(make_dir, promises.action, promises.check, work_dir=fast_dir / "work", counts=counts)
    assert counts.distinct_states > 60


def test_after_a_fault_the_log_is_correct_or_accepts_no_batches(fast_dir: Path) -> None:  # noqa: F811
    """After an error, the log accepts no more batches, and its files are in a state that a crash could leave."""
    promises = Promises(fast_dir / "whole", AppendConfig(**{**vars(CONFIG), "preallocate": True}))
    counts = Counts("append, faults")
    for_every_fault(make_dir, promises.action, promises.check, work_dir=fast_dir / "work", counts=counts,
                    share=SHARE, seed=SEED)  # fmt: skip
    assert counts.faults > 50


@pytest.mark.interop
def test_a_new_log_begins_at_the_offset_at_which_it_was_opened(kafka: Kafka, fast_dir: Path) -> None:  # noqa: F811
    """The log begins there even without data, and although no checkpoint has the log start offset."""
    opened: list[int] = []  # the number of operations until the log was open

    def action(fs: RecordingFileSystem, root: Path) -> None:
        opened.clear()
        log = PartitionLog.open(str(root / PARTITION), CONFIG, now_ms=CLOCK_MS, log_start_offset=5000, fs=fs)
        opened.append(len(fs.operations))
        log.flush(now_ms=CLOCK_MS)
        assert log.recovery_point == 5000
        try:
            log.append(_batch(0), leader_epoch=0, now_ms=CLOCK_MS)
        finally:
            log.abandon()

    def check(state: State) -> None:
        if opened and len(state.operations) >= opened[0]:
            loaded = kafka.load(state.root / PARTITION, clean=False)
            assert (loaded.log_start_offset, loaded.log_end_offset) in [(5000, 5000), (5000, 5002)]

    counts = Counts()
    for_every_stop(make_dir, action, check, work_dir=fast_dir / "work", counts=counts)
    assert counts.distinct_states > 20


@pytest.mark.interop
@pytest.mark.parametrize("preallocate", [False, True])
def test_kafka_recovers_all_flushed_data(preallocate: bool, kafka: Kafka, fast_dir: Path) -> None:  # noqa: F811
    promises = Promises(fast_dir / "whole", AppendConfig(**{**vars(CONFIG), "preallocate": preallocate}))
    counts = Counts()
    configs = {"segment.index.bytes": CONFIG.index_bytes, "preallocate": str(preallocate).lower()}

    def check(state: State) -> None:
        copy = fast_dir / "for-kafka" / PARTITION
        shutil.copytree(state.root / PARTITION, copy)
        loaded = kafka.load(copy, clean=False, fetch=True, configs=configs)
        assert loaded.log_end_offset >= promises.flushed_by(state)
        assert [r.offset for r in loaded.records] == list(range(loaded.log_end_offset))
        assert loaded.fetch_mismatches == ()
        shutil.rmtree(copy.parent)

    for_every_stop(make_dir, promises.action, check,
                   work_dir=fast_dir / "work", counts=counts, partial_cuts=0, torn_writes=False)  # fmt: skip
    assert len(promises.whole) > 700
    assert counts.distinct_states > 50


def _end(log: bytes) -> int:
    """Return the log end offset."""
    at = end = 0
    while at < len(log):
        size = int.from_bytes(log[at + 8 : at + 12], "big") + 12
        end = int.from_bytes(log[at : at + 8], "big") + int.from_bytes(log[at + 23 : at + 27], "big") + 1
        at += size
    return end
