"""Fresh copies of a log dir with the same state of the page cache, and the comparison of two cleaned copies."""

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
    """Copy with modification times, by reflinks if the file system supports them.

    The copy is durable, so that no measurement includes writing it back, and is read once, so that every measurement
    finds it in the page cache.
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

    If batches are compressed, equal records and header fields are required instead of equal bytes.
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
            found.append(f"{name} holds other batches or records")
    return found


def _same_records(item: Path, other: Path) -> bool:
    data = item.read_bytes(), other.read_bytes()
    at = [0, 0]
    while at[0] < len(data[0]) and at[1] < len(data[1]):
        batches = []
        for side in (0, 1):
            base, length = _PREFIX.unpack_from(data[side], at[side])
            batch = data[side][at[side] : at[side] + 12 + length]
            at[side] += len(batch)
            # All fields except length and checksum, and the decompressed records.
            batches.append((base, batch[12:17], batch[21:61], bytes(decompress(batch[22] & 7, batch[61:]))))
        if batches[0] != batches[1]:
            return False
    return at == [len(data[0]), len(data[1])]
