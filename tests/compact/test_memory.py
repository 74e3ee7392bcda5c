"""A task needs its map and less than 512 MiB more, even for segments of 1 GiB.

Each round runs in a separate process, which runs this file as a module. It compares its peak of private memory, as
reported by Linux, with the value after keytail was imported and its kernels were loaded.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import partial

import numpy as np
import pytest
from numba import njit

from keytail.compact import cleaner
from keytail.format.batch import HEADER_BYTES
from keytail.format.compression import compress
from keytail.kernels.native import crc32c
from keytail.log.fs import LOCAL
from keytail.log.partition import SegmentFacts
from keytail.log.records.chunk import CHUNK_BYTES, SegmentReader
from tests.bench.memory import peak_private
from tests.chance import chance
from tests.compact.logs import RandomLog, task_for, write_log
from tests.hostile.bombs import bomb_batch, tiny_records, value_records
from tests.reference.batches import Rec, encode_batch
from tests.reference.cleaner import Segment

NOW = 1_750_000_000_000
MAP_BYTES = 64 << 20
BESIDE_THE_MAP_BYTES = 512 << 20
GIB = 1 << 30
KEY_BYTES = 16
GZIP, ZSTD = 1, 4
_CRC_AT, _CRC_FROM, _CODEC_AT = 17, 21, 22


@njit
def write_checksums(data, batch_bytes):
    """Write the checksum of each batch in `data`; all batches have the same length."""
    for start in range(0, len(data), batch_bytes):
        crc = crc32c(data, start + _CRC_FROM, batch_bytes - _CRC_FROM)
        for k in range(4):
            data[start + _CRC_AT + k] = (crc >> (24 - 8 * k)) & 0xFF


def template_of(batch_records, value_bytes):
    """Return the bytes of a batch, and the positions of its keys, which have the same length."""
    mark = b"#" * KEY_BYTES
    batch = encode_batch([Rec(n, NOW - 1, mark, b"v" * value_bytes) for n in range(batch_records)])
    pieces = batch.split(mark)
    assert len(pieces) == batch_records + 1
    return batch, np.cumsum([len(piece) for piece in pieces[:-1]]) + KEY_BYTES * np.arange(batch_records)


def key_names(numbers):
    digits = np.array(numbers)[..., None] // 10 ** np.arange(KEY_BYTES - 1, -1, -1) % 10
    return (digits + ord("0")).astype(np.uint8)


def uncompressed(size_bytes, batch_records, value_bytes, keys):
    """Return copies of one batch with other base offsets and random keys."""
    template, places = template_of(batch_records, value_bytes)
    n = size_bytes // len(template)
    data = np.tile(np.frombuffer(template, np.uint8), n)
    batches = data.reshape(n, -1)
    batches[:, :8] = (np.arange(n) * batch_records).astype(">i8").view(np.uint8).reshape(n, 8)
    names = key_names(np.arange(keys))
    chosen = np.random.default_rng(1).integers(0, keys, (batch_records, n), np.int32)
    for place, key in zip(places, chosen, strict=True):
        batches[:, place : place + KEY_BYTES] = names[key]
    write_checksums(data, len(template))
    return data, n * batch_records


def compressed(size_bytes, batch_records, value_bytes):
    """Return zstd batches of which one chunk decompresses to more than the limit. Half of the records of each are
    retained.
    """
    template, places = template_of(batch_records, value_bytes)
    block = np.frombuffer(template, np.uint8)[HEADER_BYTES:].copy()
    within = np.arange(batch_records)
    columns = places[:, None] - HEADER_BYTES + np.arange(KEY_BYTES)
    parts, size, offset = [], 0, 0
    while size < size_bytes:
        block[columns] = key_names(np.where(within % 2, within, offset + within))
        packed = compress(ZSTD, memoryview(block))
        batch = np.frombuffer(bytearray(template[:HEADER_BYTES]) + packed, np.uint8)
        batch[:8] = np.frombuffer(offset.to_bytes(8, "big"), np.uint8)
        batch[8:12] = np.frombuffer((len(batch) - 12).to_bytes(4, "big"), np.uint8)
        batch[_CODEC_AT] = ZSTD
        write_checksums(batch, len(batch))
        parts.append(batch)
        size, offset = size + len(batch), offset + batch_records
    opened_bytes = len(parts) * len(block) * CHUNK_BYTES // size
    assert opened_bytes > MAP_BYTES + BESIDE_THE_MAP_BYTES, f"a chunk decompresses to only {opened_bytes} bytes"
    return np.concatenate(parts), offset


def bomb(codec, values, value_bytes, keys):
    """Return a batch that decompresses to more than a gigabyte, with few records or many, between two small batches."""
    if value_bytes:
        parts = value_records([b"k%d" % (n % keys) for n in range(values)], value_bytes)
    else:
        parts = tiny_records(values, keys)
    before, behind = ([Rec(base + n, NOW - 1, b"k%d" % n, b"v") for n in range(9)] for base in (0, 9 + values))
    packed = bomb_batch(
        codec, parts, records=values, base_offset=9, last_offset=8 + values, timestamp_ms=NOW - 1
    )
    data = encode_batch(before) + packed + encode_batch(behind)
    return np.frombuffer(data, np.uint8), values + 18


SHAPES = {
    "batches of 100": partial(uncompressed, GIB, 100, 90, 1_000_000),
    "batches of 1": partial(uncompressed, GIB // 2, 1, 90, 1_000_000),
    "batches of 1 MB": partial(uncompressed, GIB // 2, 1000, 1000, 200_000),
    "zstd, 200 to 1": partial(compressed, CHUNK_BYTES, 500, 1000),
    "a batch of 50 KB that decompresses to 1.1 GiB": partial(bomb, ZSTD, 1100, 1 << 20, 700),
    "the same in gzip": partial(bomb, GZIP, 1100, 1 << 20, 700),
    "a batch of records of 60 MiB": partial(bomb, ZSTD, 20, 60 << 20, 7),
    "a batch of a million records": partial(bomb, ZSTD, 1_000_000, 0, 1000),
}
# These two shapes cover chunks, decompressed blocks and batches in pieces, like the others.
IN_CI = ("batches of 100", "a batch of 50 KB that decompresses to 1.1 GiB")


def clean_in_a_process(directory, data, log_end_offset, **overrides):
    """Run one round over a segment of these bytes in a separate process, and return what `one_round` reports."""
    path = directory / "t-0"
    path.mkdir()
    data.tofile(path / f"{0:020d}.log")
    (path / f"{log_end_offset:020d}.log").touch()
    try:
        request = json.dumps({"path": str(path), "end": log_end_offset, **overrides})
        command = [sys.executable, "-m", "tests.compact.test_memory", request]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    finally:
        shutil.rmtree(path)
    print(done.stdout)
    return json.loads(done.stdout)


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="memory is read from Linux's /proc")
@pytest.mark.parametrize(
    "shape", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.soak("IN_CI")) for name in SHAPES]
)
def test_a_task_needs_its_map_and_less_than_512_mib(shape, tmp_path):
    data, end = SHAPES[shape]()
    answer = clean_in_a_process(tmp_path, data, end, as_written=chance().random() < 0.5)
    assert answer["records_before"] == end
    assert 0 < answer["records_after"] < end
    assert answer["growth_bytes"] <= MAP_BYTES + BESIDE_THE_MAP_BYTES
    # The limit includes the interpreter and its libraries.
    assert answer["peak_bytes"] <= MAP_BYTES + BESIDE_THE_MAP_BYTES


@pytest.mark.soak("test_a_task_needs_its_map_and_less_than_512_mib")
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="memory is read from Linux's /proc")
@pytest.mark.parametrize("shape", SHAPES)
def test_each_further_thread_needs_less_than_512_mib(shape, tmp_path):
    data, end = SHAPES[shape]()
    answer = clean_in_a_process(tmp_path, data, end, threads=3)
    assert 0 < answer["records_after"] < end
    assert answer["peak_bytes"] <= MAP_BYTES + 3 * BESIDE_THE_MAP_BYTES


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="memory is read from Linux's /proc")
def test_the_measurement_detects_a_segment_read_at_once(tmp_path):
    data, end = uncompressed(BESIDE_THE_MAP_BYTES + MAP_BYTES, 100, 90, 1000)
    answer = clean_in_a_process(tmp_path, data, end, chunk_bytes=GIB)
    assert answer["growth_bytes"] > MAP_BYTES + BESIDE_THE_MAP_BYTES


def one_round(path, end, chunk_bytes=None, threads=1, as_written=False):
    """Run one round to warm up, then a measured one; called in the separate process."""
    small = encode_batch([Rec(n, NOW, b"k%d" % (n % 3), b"v") for n in range(9)])
    segments = [Segment(0, small, 0, 0, NOW), Segment(9, b"", 0, 0, NOW)]
    with tempfile.TemporaryDirectory() as directory:
        facts = write_log(directory, segments)
        log = RandomLog(segments, [], 9, {})
        cleaner.clean_partition(LOCAL, task_for(directory, log, facts, NOW, first_dirty=0, threads=threads))
    if as_written:
        cleaner.cached_share = lambda *_: 0.0
        cleaner._EARLY_PROOF_BYTES = 1
    if chunk_bytes is not None:
        cleaner.SegmentReader = partial(SegmentReader, chunk_bytes=chunk_bytes)
    segments = [Segment(0, b"", 0, 0, NOW), Segment(end, b"", 0, 0, NOW)]
    facts = []
    for base in (0, end):
        stat = os.stat(f"{path}/{base:020d}.log")
        facts.append(SegmentFacts(base, stat.st_size, stat.st_mtime_ns, 0, 0, None, NOW, -1))
    task = task_for(
        path, RandomLog(segments, [], end, {}), tuple(facts), NOW, first_dirty=0,
        config={"segment_bytes": GIB, "index_interval_bytes": 4096}, map_memory_bytes=MAP_BYTES,
        threads=threads,
    )  # fmt: skip
    with peak_private() as peak:
        result = cleaner.clean_partition(LOCAL, task)
    return {
        "growth_bytes": peak.growth_bytes,
        "peak_bytes": peak.peak_bytes,
        "records_before": result.records_before,
        "records_after": result.records_after,
        "phases_s": result.phases_s,
    }


if __name__ == "__main__":
    print(json.dumps(one_round(**json.loads(sys.argv[1]))))
