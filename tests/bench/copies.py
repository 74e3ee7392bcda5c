"""Copies a log dir so that each copy has the same state in the page cache, and compares two cleaned copies."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
from pathlib import Path

from keytail.format.compression import decompress

COMPARED = (".log", ".index", ".timeindex")
_PREFIX = struct.Struct(">qi")


def fresh_copy(source: Path, target: Path) -> Path:
    """Copy a log dir with its modification times, by reflinks if the file system supports them. The copy is synced, so
    that no measurement includes its writeback, and read once, so that it is in the page cache.
    """
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(["cp", "--archive", "--reflink=auto", str(source), str(target)], check=True)
    for path in sorted(target.rglob("*")):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                while os.read(fd, 8 << 20):
                    pass
            finally:
                os.close(fd)
    return target


def differences(kafka: Path, ours: Path, *, compressed: bool) -> list[str]:
    """Return the differences between two partition directories as text: names, and bytes of logs and indexes.

    If batches are compressed, records and header fields are compared instead of bytes.
    """
    theirs, own = (
        {path.name for path in directory.iterdir() if path.suffix in COMPARED} for directory in (kafka, ours)
    )
    found = [f"only Kafka left {name}" for name in sorted(theirs - own)]
    found += [f"only keytail left {name}" for name in sorted(own - theirs)]
    for name in sorted(theirs & own):
        if not compressed and (kafka / name).read_bytes() != (ours / name).read_bytes():
            found.append(f"{name} differs")
        elif compressed and name.endswith(".log") and not _same_records(kafka / name, ours / name):
            found.append(f"{name} has other batches or records")
    return found


def _same_records(kafka: Path, ours: Path) -> bool:
    data = kafka.read_bytes(), ours.read_bytes()
    at = [0, 0]
    while at[0] < len(data[0]) and at[1] < len(data[1]):
        batches = []
        for side in (0, 1):
            base, length = _PREFIX.unpack_from(data[side], at[side])
            batch = data[side][at[side] : at[side] + 12 + length]
            at[side] += len(batch)
            # all header fields except length and checksum, and the decompressed records
            batches.append((base, batch[12:17], batch[21:61], bytes(decompress(batch[22] & 7, batch[61:]))))
        if batches[0] != batches[1]:
            return False
    return at == [len(data[0]), len(data[1])]
