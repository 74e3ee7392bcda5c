"""The offset up to which a log may be read, determined from the files that a broker left beside it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from keytail.errors import CorruptLog, Refused
from keytail.log.fs import LOCAL
from keytail.log.readable import Readable, readable
from tests.chance import SEED
from tests.growing_log import GrowingLog


@pytest.fixture
def log(tmp_path: Path) -> GrowingLog:
    made = GrowingLog(random.Random(SEED), tmp_path)
    for _ in range(10):
        made.append(2)
    made.write()
    return made


def asked(log: GrowingLog, *, committed: bool = False, log_end: bool = False) -> Readable:
    return readable(LOCAL, log.facts(), committed=committed, log_end=log_end, now_ms=log.now_ms)


def test_a_log_may_be_read_up_to_its_high_watermark_or_its_end(log: GrowingLog) -> None:
    assert asked(log).end_offset == 20
    log.write(high_watermark=7)
    assert asked(log) == Readable(7)
    found = asked(log, log_end=True)
    assert found.end_offset == 20
    assert "instead of the high watermark" in found.notes[0]
    (log.log_dir / "replication-offset-checkpoint").unlink()
    with pytest.raises(Refused, match="log-end"):
        asked(log)
    assert asked(log, log_end=True).end_offset == 20


def test_the_readable_end_is_never_below_the_log_start(log: GrowingLog) -> None:
    log.start = 9
    log.write(high_watermark=3)
    assert asked(log).end_offset == 9


def test_an_open_transaction_ends_a_committed_read(log: GrowingLog) -> None:
    log.append(2, producer=1)
    log.append(2)
    log.write()
    assert asked(log).end_offset == 24
    found = asked(log, committed=True)
    assert found.end_offset == 20
    assert "producer id 1" in found.notes[0]


def test_bytes_after_the_last_batch_are_refused_only_after_a_clean_shutdown(log: GrowingLog) -> None:
    """Only a broker that crashed, or is writing, can leave bytes that are not a batch."""
    file = log.path / f"{0:020d}.log"
    whole = file.read_bytes()
    file.write_bytes(whole + b"\x01" * 40)
    with pytest.raises(CorruptLog, match="the 40 bytes after them are not a batch") as caught:
        asked(log)
    assert (caught.value.byte_position, caught.value.offset) == (len(whole), 20)
    with pytest.raises(CorruptLog):
        asked(log, log_end=True)
    (log.log_dir / ".kafka_cleanshutdown").unlink()
    assert asked(log).end_offset == 20


def test_a_log_that_ends_before_its_high_watermark_is_refused_except_up_to_the_log_end(log: GrowingLog) -> None:
    (log.log_dir / ".kafka_cleanshutdown").unlink()
    file = log.path / f"{0:020d}.log"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptLog, match="end at offset 18, before the high watermark 20"):
        asked(log)
    assert asked(log, log_end=True).end_offset == 18


def test_segments_that_are_being_replaced_are_refused(log: GrowingLog) -> None:
    """A replacement was committed but not finished: the sources are renamed, and only the file names show this."""
    log.roll()
    log.append(2)
    log.write()
    source = log.path / f"{0:020d}.log"
    (log.path / f"{0:020d}.log.swap").write_bytes(source.read_bytes())
    with pytest.raises(Refused, match="segments may be missing") as caught:
        asked(log)
    assert str(caught.value.path).endswith(".log.swap")
    source.rename(log.path / f"{0:020d}.log.deleted")
    with pytest.raises(Refused, match="segments may be missing"):
        asked(log, log_end=True)
    (log.path / f"{0:020d}.log.swap").unlink()
    (log.path / f"{0:020d}.log.deleted").rename(source)
    (log.path / f"{7:020d}.log.deleted").touch()  # a broker retains such a file for a minute
    assert asked(log).end_offset == 22
