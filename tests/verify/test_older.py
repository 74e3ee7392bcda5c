"""Index entries that only Kafka before 4.0 writes, and wrong ones: `verify` and `rebuild-index` agree on each."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from keytail.log.fs import LOCAL
from keytail.rebuild_index.indexes import SegmentTask, index_segment
from keytail.verify.task import verify_partition
from tests.reference.batches import Rec, encode_batch

NOW = 1_700_000_000_000
GZIP, NONE = 1, 0


def batch(offsets: list[int], times: list[int], last: int | None = None, codec: int = NONE, **fields: bool) -> bytes:
    records = [Rec(offset, NOW + at, b"k", b"v" * 20) for offset, at in zip(offsets, times, strict=True)]
    return encode_batch(records, last_offset=offsets[-1] if last is None else last, codec=codec, **fields)


def batches(codec: int) -> list[bytes]:
    """Return batches of offsets 0 to 3, 4 to 9 (of which 6, 8 and 9 are missing), 10 to 12, and 13; times rise except
    within batches.
    """
    return [
        batch([0, 1, 2, 3], [1, 2, 3, 4], codec=codec),
        batch([4, 5, 7], [5, 9, 8], last=9, codec=codec),
        batch([10, 11, 12], [6, 9, 7], codec=codec),
        batch([13], [20], codec=codec),
    ]


def are_indexes_valid(
    path: Path, index: list[tuple[int, int]], times: list[tuple[int, int]], codec: int
) -> tuple[bool, bool]:
    """Return whether the offset index is valid, and whether the time index is, after checking that both commands
    agree. An entry of `index` is (offset, number of a batch).
    """
    log = batches(codec)
    positions = np.concatenate([[0], np.cumsum([len(item) for item in log])])
    path.mkdir(exist_ok=True)
    stem = path / f"{0:020d}"
    stem.with_suffix(".log").write_bytes(b"".join(log))
    stem.with_suffix(".index").write_bytes(
        b"".join(struct.pack(">ii", offset, positions[number]) for offset, number in index)
    )
    stem.with_suffix(".timeindex").write_bytes(b"".join(struct.pack(">qi", NOW + at, offset) for at, offset in times))
    found = {Path(finding.path).suffix for finding in verify_partition(LOCAL, str(path))} & {".index", ".timeindex"}
    stat = stem.with_suffix(".log").stat()
    task = SegmentTask(str(path), 0, stat.st_size, stat.st_mtime_ns, 2**63 - 1, 0, 60, 1 << 20)
    wrong = {verdict.suffix for verdict in index_segment(LOCAL, task).files if verdict.state == "wrong"}
    assert found == wrong
    return ".index" not in found, ".timeindex" not in found


TIMES = [(4, 3), (9, 9), (20, 13)]
INDEX = [(9, 1), (13, 3)]


@pytest.mark.parametrize("codec", [NONE, GZIP])
@pytest.mark.parametrize(
    ("index", "is_sound"),
    [
        (INDEX, True),
        ([(12, 1)], True),  # an entry for a set of two batches
        ([(13, 1)], True),  # an entry for a set of three batches up to the end
        ([(12, 1), (13, 3)], True),
        ([(7, 0)], True),  # an entry for a set whose last record is not the end of its batch
        ([(7, 1)], True),
        ([(5, 1)], False),  # the offset of a record, but not of the last one in its batch
        ([(6, 1)], False),  # an offset without a record
        ([(8, 0)], False),
        ([(3, 1)], False),  # an offset of the previous batch
        ([(12, 1), (13, 2)], False),  # the set extends into that of the next entry
        ([(14, 1)], False),  # no batch contains the offset
        ([(14, 3)], False),
    ],
)
def test_offset_entries_of_older_brokers_are_checked(
    tmp_path: Path, index: list[tuple[int, int]], is_sound: bool, codec: int
) -> None:
    assert are_indexes_valid(tmp_path / "t-0", index, TIMES, codec) == (is_sound, True)


@pytest.mark.parametrize("codec", [NONE, GZIP])
@pytest.mark.parametrize(
    ("times", "is_sound"),
    [
        (TIMES, True),
        ([(4, 3), (9, 5), (20, 13)], True),  # the entry has the offset of the record
        ([(20, 13)], True),
        ([(4, 3), (9, 4), (20, 13)], False),  # the offset of a record with another timestamp
        ([(4, 3), (9, 6), (20, 13)], False),  # an offset without a record
        ([(4, 3), (8, 7), (20, 13)], False),  # the offset of a record whose timestamp is not the largest of its batch
        ([(4, 3), (9, 11), (20, 13)], False),  # a later batch has the timestamp, too
        ([(4, 3), (9, 12), (20, 13)], False),
        ([(3, 2), (20, 13)], False),
        ([(4, 3), (9, 5)], False),  # the entry of the largest timestamp is missing
    ],
)
def test_time_entries_of_older_brokers_are_checked(
    tmp_path: Path, times: list[tuple[int, int]], is_sound: bool, codec: int
) -> None:
    assert are_indexes_valid(tmp_path / "t-0", INDEX, times, codec) == (True, is_sound)


def test_a_batch_that_cannot_be_decompressed_is_one_finding(tmp_path: Path) -> None:
    are_indexes_valid(tmp_path / "t-0", INDEX, [(4, 3), (9, 5), (20, 13)], GZIP)
    log = tmp_path / "t-0" / f"{0:020d}.log"
    data = bytearray(log.read_bytes())
    at = len(batches(GZIP)[0]) + 61 + 12
    data[at] ^= 0xFF
    log.write_bytes(data)
    kinds = [finding.kind for finding in verify_partition(LOCAL, str(tmp_path / "t-0")) if finding.kind[:5] != "epoch"]
    assert kinds == ["checksum"]
