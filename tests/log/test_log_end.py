"""The end of a log file is found with any contents of its index, and after truncation at any byte."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from keytail.errors import CorruptLog
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.log_end import LogEnd, log_end
from tests.crash.partitions import log_of
from tests.reference.batches import Rec, encode_batch
from tests.reference.legacy import encode_single


def _end(tmp_path: Path, log: bytes, index: bytes | None, base: int = 0) -> LogEnd:
    path = tmp_path / f"{base:020d}.log"
    path.write_bytes(log)
    if index is not None:
        path.with_suffix(".index").write_bytes(index)
    return log_end(LOCAL, str(path), base)


LOG = log_of(range(10))
STEP = len(LOG) // 5


@pytest.mark.parametrize(
    "index",
    [
        None,
        b"",
        bytes(80),
        struct.pack(">ii", 7, 3 * STEP),
        struct.pack(">ii", 9, 4 * STEP) + b"\0\0\0",
        struct.pack(">ii", 8, 3 * STEP),  # the offset is not the last one of that batch
        struct.pack(">ii", 7, 3 * STEP + 1),  # no batch begins at the position
        struct.pack(">ii", 9, len(LOG)),
        struct.pack(">ii", 9, 2**31 - 1),
        struct.pack(">ii", 9, -5),
    ],
)
def test_the_end_does_not_depend_on_the_index(index: bytes | None, tmp_path: Path) -> None:
    assert _end(tmp_path, LOG, index) == LogEnd(10, len(LOG), 0)


@pytest.mark.parametrize("cut", [1, 11, 12, 16, 17, 26, 60, 61, STEP - 1])
def test_an_incomplete_last_batch_is_tolerated(cut: int, tmp_path: Path) -> None:
    for index in (None, struct.pack(">ii", 5, 2 * STEP)):
        assert _end(tmp_path, LOG[: 4 * STEP + cut], index) == LogEnd(8, 4 * STEP, cut)


@pytest.mark.parametrize("length", [-1, 0, 13, 48, 2**31 - 1])
def test_bytes_that_are_not_a_batch_end_the_log(length: int, tmp_path: Path) -> None:
    at = 3 * STEP
    log = LOG[: at + 8] + struct.pack(">i", length) + LOG[at + 12 :]
    assert _end(tmp_path, log, None) == LogEnd(6, at, len(LOG) - at)


def test_an_empty_log_ends_at_its_base(tmp_path: Path) -> None:
    assert _end(tmp_path, b"", b"", base=70) == LogEnd(70, 0, 0)


def test_the_end_of_a_log_larger_than_the_window_is_found(tmp_path: Path) -> None:
    log = log_of(range(4000)) + encode_batch([Rec(5000, 1, b"k", b"v" * 200_000)]) + log_of(range(6000, 6003))
    assert _end(tmp_path, log, None) == LogEnd(6003, len(log), 0)


def test_an_index_entry_for_a_batch_within_a_value_is_ignored(tmp_path: Path) -> None:
    """The values of a topic may contain Kafka log data: bytes inside a value that look like a batch are not one."""
    inner = encode_batch([Rec(700, 1, b"k", b"v" * 100)])
    log = encode_batch([Rec(0, 1, b"k", inner), Rec(1, 1, b"k", b"v")])
    assert _end(tmp_path, log, struct.pack(">ii", 1, log.index(inner))) == LogEnd(2, len(log), 0)


def test_legacy_batches_end_with_their_own_offset(tmp_path: Path) -> None:
    log = encode_single(Rec(3, -1, b"k", b"v"), magic=0) + encode_single(Rec(9, 5, b"k", b"v"), magic=1)
    assert _end(tmp_path, log, None) == LogEnd(10, len(log), 0)


def test_a_file_that_is_truncated_during_the_read_has_no_end(tmp_path: Path) -> None:
    """After the bytes that could be read, the window contains bytes of an earlier read, which are not in the file."""
    path = tmp_path / f"{0:020d}.log"
    path.write_bytes(log_of(range(4000)))

    class Truncation(FileSystem):
        def read_into(self, fd, buffer, position):
            return super().read_into(fd, memoryview(buffer)[: 100_000 - position], position)

    assert log_end(LOCAL, str(path), 0).next_offset == 4000
    assert path.stat().st_size > 110_000
    with pytest.raises(CorruptLog, match="became shorter while it was read: 100000 of"):
        log_end(Truncation(), str(path), 0)
