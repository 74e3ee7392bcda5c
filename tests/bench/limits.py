"""Measures the work that no log cleaner can avoid, each part separately over the same bytes, as the reference of
`shapes.py`. The parts: read the log, verify checksums, decompress, hash one key per record; compress rebuilt batches,
write the retained ones, and sync them. Each uses one core, large blocks, and the fastest implementation available.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cramjam
import crc32c
import lz4.frame
import numpy as np
import zstandard
from isal import isal_zlib

from keytail.format.compression import compress, decompress
from keytail.kernels.jit import kernel
from keytail.kernels.native import xxh3_128

_PIECE_BYTES = 1 << 20
_HEADER_BYTES = 61
_XERIAL_BYTES = 20  # the framing's header and the length of its first block
_REPEATS = 3


def limits(log_dir: str, output: str) -> dict[str, float]:
    """Return the seconds of each part, the minimum of a few runs. `log_dir` has the partition before the compaction,
    `output` after.
    """
    before, after = (sorted(Path(path).glob("*.log")) for path in (log_dir, output))
    source, left = list(_batches(before)), list(_batches(after))
    known = {(batch[:8], batch[17:21]) for batch in source}
    rebuilt = [batch for batch in left if (batch[:8], batch[17:21]) not in known]
    records = sum(int.from_bytes(batch[57:61], "big") for batch in source)
    pieces = [path.read_bytes() for path in after]
    return {
        "read": _best(lambda: _read(before)),
        "read output": _best(lambda: _read(after)),
        "checksum": max(0.0, _best(lambda: _checksum(before)) - _best(lambda: _read(before))),
        "decompress": _best(lambda: _decompress(source)),
        "decompress output": _best(lambda: _decompress(left)),
        "hash": _best(lambda: hash_many(np.zeros(1 << 16, np.uint8), records)),
        "compress": _compress(rebuilt),
        "write": _best(lambda: _write(Path(output), pieces), time.perf_counter),  # includes waiting for the disk
    }


def of_phases(parts: dict[str, float]) -> dict[str, float]:
    """Return the limit of each phase of a task, from `parts`: each phase reads and checks its input again."""
    read = parts["read"] + parts["checksum"]
    output_share = parts["read output"] / parts["read"] if parts["read"] else 0.0
    read_output = parts["read output"] + parts["checksum"] * output_share
    return {
        "map": read + parts["decompress"] + parts["hash"],
        "write": read + parts["compress"] + parts["write"],
        "prove": read + read_output + parts["decompress"] + parts["decompress output"] + parts["hash"],
    }


def of_task(parts: dict[str, float]) -> float:
    """Return the seconds of a cleaner that reads the log once, without a proof."""
    return sum(parts[name] for name in ("read", "checksum", "decompress", "hash", "compress", "write"))


def _best(work: Callable[[], Any], clock: Callable[[], float] = time.thread_time) -> float:
    """Return the minimum of the CPU seconds, which other processes on the machine affect least."""
    times = []
    for _ in range(_REPEATS):
        started = clock()
        work()
        times.append(clock() - started)
    return min(times)


def _batches(paths: list[Path]) -> Iterator[bytes]:
    for path in paths:
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = struct.unpack_from(">i", data, at + 8)[0] + 12
            yield data[at : at + size]
            at += size


def _read(paths: list[Path]) -> None:
    _each_piece(paths, lambda piece: None)


def _checksum(paths: list[Path]) -> None:
    _each_piece(paths, crc32c.crc32c)


def _each_piece(paths: list[Path], work: Callable[[memoryview], Any]) -> None:
    buffer = bytearray(_PIECE_BYTES)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while n := file.readinto(buffer):
                work(memoryview(buffer)[:n])


_OPENERS: dict[int, Callable[[bytes], Any]] = {
    1: lambda block: isal_zlib.decompress(block, 31),
    2: lambda block: cramjam.snappy.decompress_raw(block[_XERIAL_BYTES:]),
    3: lz4.frame.decompress,
    4: lambda block: _ZSTD.decompress(block, max_output_size=1 << 24),
}
_ZSTD = zstandard.ZstdDecompressor()


def _decompress(batches: list[bytes]) -> None:
    for batch in batches:
        codec = batch[22] & 7
        if codec:
            _OPENERS[codec](batch[_HEADER_BYTES:])


def _compress(batches: list[bytes]) -> float:
    blocks = [(batch[22] & 7, decompress(batch[22] & 7, batch[_HEADER_BYTES:])) for batch in batches if batch[22] & 7]
    return _best(lambda: [compress(codec, block) for codec, block in blocks])


@kernel
def hash_many(data, n):
    """Hash `n` keys, all of which are in the cache."""
    total = np.uint64(0)
    for i in range(n):
        low, high = xxh3_128(data, (i * 16) & 0xFFEF, 16, np.uint64(1))
        total ^= low ^ high
    return total


def _write(directory: Path, pieces: list[bytes]) -> None:
    path = directory / "limit.clean"
    with path.open("wb", buffering=0) as file:
        for piece in pieces:
            for at in range(0, len(piece), _PIECE_BYTES):
                file.write(memoryview(piece)[at : at + _PIECE_BYTES])
        os.fsync(file.fileno())
    path.unlink()
