"""Finds where a log stops being valid (its torn tail), and truncates it there as a broker does in a recovery.

Incomplete data of a crash may be truncated; damage below the recovery point, or after a clean shutdown, has other
causes and is refused. TAIL.md beside this file describes the order of the steps and every state on disk. The caller
decides whether to truncate; it holds the locks and has resolved leftovers of replacements.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from keytail.errors import CORRUPT_HELP, CorruptLog, Refused
from keytail.format import names
from keytail.format.batch import CRC_START, HEADER_BYTES, LENGTH_PREFIX_BYTES, MIN_RECORD_OVERHEAD_BYTES
from keytail.kernels.native import crc32c
from keytail.log.checkpoint import update_offset
from keytail.log.fs import FileSystem
from keytail.log.lock import refuse_lost
from keytail.log.partition import PartitionFacts, SegmentFacts

_MAGIC_AT, _CRC_AT, _LEGACY_CRC_AT = 16, 17, 12
_MIN_BYTES = _MAGIC_AT + 1  # minimum size of a batch whose magic can be read
_NOT_TRUNCATED_REMEDY = f"Nothing was changed. {CORRUPT_HELP['re-fetch']}. {CORRUPT_HELP['salvage']}"


@dataclass(frozen=True, slots=True)
class TornTail:
    """The position at which a segment stops being valid. `what` describes the damage there.

    `broker_truncates`: a broker that recovers the segment also truncates it here. A broker does not check everything
    that a reader checks.
    """

    base_offset: int
    byte_position: int  # valid batches end here
    next_offset: int  # offset after the last valid batch; the base offset if no batch is valid
    log_bytes: int
    what: str
    broker_truncates: bool


@dataclass(frozen=True, slots=True)
class Truncation:
    """A planned truncation and its consequences. Offsets from `next_offset` to `lost_end` are lost.

    `lost_end` follows from the headers after the tear, or is the high watermark if that is higher, because the replica
    once reached it. A checkpoint is None if it does not change. `removed` contains file names.
    """

    tail: TornTail
    lost_end: int
    removed: tuple[str, ...]
    removed_segments: tuple[int, ...]
    cleaner_checkpoint: int | None
    high_watermark: int | None
    acknowledged_until: int | None  # lost offsets below this offset were below the high watermark

    @property
    def next_offset(self) -> int:
        return self.tail.next_offset

    @property
    def truncated_bytes(self) -> int:
        return self.tail.log_bytes - self.tail.byte_position


def torn_tail(
    fs: FileSystem, partition_path: str, segment: SegmentFacts, next_offset: int, damage: CorruptLog
) -> TornTail:
    """Return the torn tail of a segment that was read up to `damage`; `next_offset` is the offset after its last valid
    batch."""
    assert damage.byte_position is not None
    path = os.path.join(partition_path, names.segment_file(segment.base_offset, names.LOG))
    truncates = _broker_truncates(fs, path, damage.byte_position, segment.log_bytes)
    return TornTail(segment.base_offset, damage.byte_position, next_offset, segment.log_bytes, damage.what, truncates)


def _broker_truncates(fs: FileSystem, path: str, position: int, log_bytes: int) -> bool:
    """Return whether a broker's recovery rejects the bytes at `position` as a batch (TAIL.md lists the cases)."""
    head = fs.read_at(path, position, min(_MIN_BYTES, log_bytes - position))
    if len(head) < _MIN_BYTES:
        return True
    length = int.from_bytes(head[8:12], "big", signed=True)
    magic = int.from_bytes(head[_MAGIC_AT:], "big", signed=True)
    size_bytes = LENGTH_PREFIX_BYTES + length
    if length < MIN_RECORD_OVERHEAD_BYTES or position + size_bytes > log_bytes:
        return True
    if magic >= 2 and size_bytes < HEADER_BYTES:
        return True
    batch = fs.read_at(path, position, size_bytes)
    if magic < 2:
        crc = int.from_bytes(batch[_LEGACY_CRC_AT:_MAGIC_AT], "big")
        return crc != zlib.crc32(batch[_MAGIC_AT:])
    crc = int.from_bytes(batch[_CRC_AT:CRC_START], "big")
    return crc != int(crc32c(np.frombuffer(batch, np.uint8), CRC_START, size_bytes - CRC_START))


def plan_truncation(facts: PartitionFacts, tail: TornTail, file_names: Collection[str]) -> Truncation:
    """Return what a truncation at `tail` removes. Raises CorruptLog if truncation is not the correct repair of
    the damage.

    `file_names` is the listing of the partition directory.
    """
    _refuse(facts, tail)
    listed = [names.parse_file_name(name) for name in sorted(file_names)]
    removed = [
        file
        for file in listed
        if file.kind == "live"
        and file.base_offset is not None
        and file.base_offset > (tail.next_offset if file.suffix == names.SNAPSHOT else tail.base_offset)
    ]
    checkpoint, high_watermark = facts.cleaner_checkpoint, facts.high_watermark
    lost_end = max(facts.log_end_offset, tail.next_offset, high_watermark or 0)
    return Truncation(
        tail,
        lost_end,
        tuple(file.name for file in removed),
        tuple(file.base_offset for file in removed if file.suffix == names.LOG and file.base_offset is not None),
        tail.base_offset if checkpoint is not None and checkpoint > tail.base_offset else None,
        tail.next_offset if high_watermark is not None and high_watermark > tail.next_offset else None,
        high_watermark if high_watermark is not None and high_watermark > tail.next_offset else None,
    )


def _refuse(facts: PartitionFacts, tail: TornTail) -> None:
    why = ""
    # A broker recovers the segments from the one that contains the recovery point on.
    bases = [segment.base_offset for segment in facts.segments]
    recovered_from = max((base for base in bases if base <= facts.recovery_point), default=bases[0])
    if facts.clean_shutdown:
        why = f"the broker stopped cleanly ({names.CLEAN_SHUTDOWN} exists), so this is not an interrupted write"
    elif tail.next_offset < facts.recovery_point or tail.base_offset < recovered_from:
        why = f"the damage is below the recovery point {facts.recovery_point}, up to which the log was flushed to disk"
    elif not tail.broker_truncates:
        why = "a broker that recovers the log would not truncate it here"
    elif tail.next_offset < facts.log_start_offset:
        why = f"the damage is below the log start offset {facts.log_start_offset}: a broker would delete the whole log"
    if why:
        raise CorruptLog(
            f"the log is not truncated at its first invalid byte ({tail.what}): {why}",
            path=os.path.join(facts.path, names.segment_file(tail.base_offset, names.LOG)),
            byte_position=tail.byte_position,
            offset=tail.next_offset,
            remedy=_NOT_TRUNCATED_REMEDY,
            slug="damage-not-truncated",
        )


def truncate_tail(
    fs: FileSystem, facts: PartitionFacts, torn: Truncation, *, hosted: Collection[tuple[str, int]]
) -> None:
    """Truncate the log, in the order that TAIL.md specifies. Afterwards the segment has no index files.

    `hosted` are the partitions of the log dir, whose entries are retained in its cleaner checkpoint. If the process is
    killed at any moment, a new run finds the same truncation and completes it.
    """
    log_path = os.path.join(facts.path, names.segment_file(torn.tail.base_offset, names.LOG))
    _refuse_unfit(fs, log_path, torn)
    refuse_lost(fs, facts.path)
    key = (facts.topic, facts.partition)
    if torn.cleaner_checkpoint is not None:
        path = os.path.join(facts.log_dir, names.CLEANER_CHECKPOINT)
        update_offset(fs, path, key, torn.cleaner_checkpoint, hosted=hosted)
    if torn.high_watermark is not None:  # the file also has entries of future replicas, so all entries are kept
        path = os.path.join(facts.log_dir, names.HIGH_WATERMARK_CHECKPOINT)
        update_offset(fs, path, key, torn.high_watermark, hosted=None)
    # The logs are removed durably first: a broker that starts reads the epochs of a log without an index before the
    # epochs of the logs below it.
    for is_log in (True, False):
        _unlink(fs, facts.path, (name for name in reversed(torn.removed) if name.endswith(names.LOG) == is_log))
    # The indexes are removed last: a broker that finds no index rebuilds it, truncates the log in the process, and then
    # retains later segments.
    _unlink(fs, facts.path, (names.segment_file(torn.tail.base_offset, suffix) for suffix in names.INDEX_SUFFIXES))
    refuse_lost(fs, log_path)
    fd = fs.open_write(log_path)
    try:
        fs.truncate(fd, torn.tail.byte_position)
        fs.fsync(fd)
    finally:
        fs.close(fd)


def _refuse_unfit(fs: FileSystem, log_path: str, torn: Truncation) -> None:
    facts = fs.stat(log_path)
    size_bytes = facts.size_bytes
    if facts.links > 1:
        raise Refused(
            f"the file has {facts.links} hard links, and truncation would change it under all its names, so nothing "
            "was changed",
            path=log_path,
            remedy="If another name belongs to a backup (made by `cp -l`, or by keytail for `undo`), first replace the "
            "file under this name by a copy: `cp -p X.log X.log.copy`, then `mv X.log.copy X.log`. A starting broker "
            "would also truncate the file under all its names",
            slug="segment-has-hard-links",
        )
    if size_bytes != torn.tail.log_bytes:
        raise Refused(
            f"the segment has changed since it was read: it had {torn.tail.log_bytes} bytes and now has {size_bytes}; "
            "nothing was changed",
            path=log_path,
            remedy="Another process writes to this directory; stop it and run again",
            slug="segment-changed",
        )


def _unlink(fs: FileSystem, path: str, file_names: Iterable[str]) -> None:
    """Remove the files that exist, durably."""
    there = {entry.name for entry in fs.scan(path)}
    removed = [name for name in file_names if name in there]
    refuse_lost(fs, path)
    for name in removed:
        fs.unlink(os.path.join(path, name))
    if removed:
        fs.fsync_dir(path)
