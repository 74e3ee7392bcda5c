"""Compares two partition directories after a round, file by file (promise 3).

Uncompressed logs and their indexes must have the same bytes. If Kafka recompressed a batch, only the bytes of that
batch may differ, with its length and checksum; then the indexes must match the log in the same directory.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from tests.reference.batches import Batch, decode_log
from tests.reference.indexing import index_files

TIMED = (".log", ".index", ".timeindex")


def differences(kafka: Path, keytail: Path, *, index_interval_bytes: int) -> list[str]:
    """Return every difference as text; an empty list means that the directories contain the same result."""
    theirs, own = sorted(os.listdir(kafka)), sorted(os.listdir(keytail))
    found = []
    if theirs != own:
        only_kafka, only_keytail = sorted(set(theirs) - set(own)), sorted(set(own) - set(theirs))
        found.append(f"files: only Kafka's {only_kafka}, only keytail's {only_keytail}")
    both = [name for name in theirs if name in own]
    logs = [name for name in both if name.endswith(".log")]
    for name in logs:
        found += _segment_differences(kafka, keytail, name.removesuffix(".log"), index_interval_bytes)
    for name in both:
        if not name.endswith(TIMED) and (kafka / name).read_bytes() != (keytail / name).read_bytes():
            found.append(f"{name}: bytes differ")
    # Kafka opened its copy, which changes the indexes of the active segment.
    active = max(logs, default="").removesuffix(".log")
    for name in both:
        if name.endswith(TIMED) and not (name.startswith(active) and not name.endswith(".log")):
            times = (kafka / name).stat().st_mtime_ns, (keytail / name).stat().st_mtime_ns
            if times[0] != times[1]:
                found.append(f"{name}: mtime of Kafka's {times[0]} ns, of keytail's {times[1]} ns")
    return found


def _segment_differences(kafka: Path, keytail: Path, stem: str, index_interval_bytes: int) -> list[str]:
    log, index, time_index = (
        ((kafka / (stem + suffix)).read_bytes(), (keytail / (stem + suffix)).read_bytes()) for suffix in TIMED
    )
    if log[0] == log[1]:
        pairs = zip(TIMED[1:], (index, time_index), strict=True)
        return [f"{stem}{suffix}: bytes differ" for suffix, pair in pairs if pair[0] != pair[1]]
    found = _batch_differences(stem, decode_log(log[0]), decode_log(log[1]), log)
    if not found and (index[1], time_index[1]) != index_files(log[1], int(stem), index_interval_bytes):
        found.append(f"{stem}: the indexes do not match the log in the same directory")
    return found


def _batch_differences(
    stem: str, theirs: list[Batch], own: list[Batch], log: tuple[bytes, bytes]
) -> list[str]:
    found = []
    for ordinal, (their, my) in enumerate(zip(theirs, own, strict=False)):
        where = f"{stem}.log, batch {ordinal} at offset {their.base_offset}"
        if replace(their, position=0, size=0, crc=0) != replace(my, position=0, size=0, crc=0):
            found.append(f"{where}: Kafka's {their} with {their.records}, keytail's {my} with {my.records}")
        elif their.codec == 0 and _raw(log[0], their) != _raw(log[1], my):
            found.append(f"{where}: not compressed, and the bytes differ")
    if len(theirs) != len(own):
        extra = [batch.base_offset for batch in (theirs[len(own) :] or own[len(theirs) :])]
        found.append(f"{stem}.log: Kafka's has {len(theirs)} batches, keytail's {len(own)}; only on one side: {extra}")
    return found


def _raw(log: bytes, batch: Batch) -> bytes:
    return log[batch.position : batch.position + batch.size]
