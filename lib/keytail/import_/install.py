"""Appends imported segments to a partition, and copies of these segments to its other replicas.

At every instant a broker that starts finds in a partition either all records of an import or none; IMPORT.md beside
this file lists the states on disk. The caller holds the locks, has resolved leftovers (`recover.recover`) and has the
plan (`plan.py`). New files, like scratch files, get owner and mode from the partition directory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace

from keytail.errors import WRITTEN_TO, KeytailError
from keytail.format import names
from keytail.format.metadata import encode_topic_id
from keytail.import_.plan import ImportPlan, ReplicaFacts, producers_at_end, refuse_unclosed, with_epoch
from keytail.import_.segments import Written
from keytail.log.checkpoint import read_offsets, update_offset, write_epochs
from keytail.log.copying import copy_file
from keytail.log.empty_segment import make_empty_segment
from keytail.log.fs import FileSystem
from keytail.log.import_record import ImportRecord
from keytail.log.lock import refuse_lost
from keytail.log.partition import PartitionFacts
from keytail.log.replacement.recover import recover
from keytail.log.replacement.replace import CleanFile, GroupOutput, OutputSegment, SnapshotFile, commit_group
from keytail.log.small_file import replace_file

_ATTEMPT = "driver"


def make_partition(fs: FileSystem, log_dir: str, topic: str, partition: int, topic_id: str) -> None:
    """Create an empty partition, with the files that a broker has for a new partition which it leads."""
    path = os.path.join(log_dir, names.partition_dir(topic, partition))
    refuse_lost(fs, log_dir)
    fs.mkdir(path, fs.stat(log_dir))
    fs.fsync_dir(log_dir)
    complete_partition(fs, path, topic_id)


def complete_partition(fs: FileSystem, path: str, topic_id: str) -> None:
    """Create the missing files of an empty partition whose creation may have been interrupted."""
    like = fs.stat(path)
    there = {entry.name for entry in fs.scan(path)}
    if names.PARTITION_METADATA not in there:
        replace_file(fs, os.path.join(path, names.PARTITION_METADATA), encode_topic_id(topic_id), like)
    if not any(names.parse_file_name(name).suffix == names.LOG for name in there):
        make_empty_segment(fs, path, 0, like)


def install(fs: FileSystem, plan: ImportPlan, written: Written, import_id: str, run_id: str) -> ImportRecord:
    """Commit the tasks' segments in the first replica, copy them to the other replicas, move checkpoints; return the
    record.

    Raises Refused before the first change if a replica does not permit an append. After a kill at any moment, the next
    run's plan finds which replicas have the import, and `finish` completes the import.
    """
    for replica in plan.replicas:
        _refuse_unfit(fs, replica)
    record = ImportRecord(
        import_id,
        plan.base_offset,
        written.end_offset,
        tuple(segment.base_offset for segment in written.segments),
        written.first_crc,
        written.records,
        "begun",
    )
    _commit(fs, plan, plan.replicas[0], written.segments, record, run_id)
    finish(fs, replace(plan, record=record, states=("committed", *plan.states[1:])), run_id)
    return record


def finish(fs: FileSystem, plan: ImportPlan, run_id: str) -> None:
    """Complete an import that at least one replica has: copy it to the other replicas, then move the checkpoints."""
    record = plan.record
    assert record is not None
    pairs = list(zip(plan.replicas, plan.states, strict=True))
    source = next(replica for replica, state in pairs if state != "new")
    for replica, state in pairs:
        if state == "new":
            _refuse_unfit(fs, replica)
            segments = tuple(_copied(fs, source.path, replica.path, base, run_id) for base in record.segment_bases)
            _commit(fs, plan, replica, segments, replace(record, progress="begun"), run_id)
    # Checkpoints move only when all replicas have the import: another leader must not truncate a committed offset.
    for replica, state in pairs:
        if state != "done":
            _move_checkpoints(fs, replica.facts, record.end_offset)
            _write_record(fs, replica.path, replace(record, progress="done"))


def _refuse_unfit(fs: FileSystem, replica: ReplicaFacts) -> None:
    refuse_unclosed(fs, replica.facts)
    producers_at_end(fs, replica.facts)


def _commit(
    fs: FileSystem,
    plan: ImportPlan,
    replica: ReplicaFacts,
    segments: Sequence[OutputSegment],
    record: ImportRecord,
    run_id: str,
) -> None:
    """Commit `segments`, whose scratch files are durable in the replica's directory, by the steps of IMPORT.md.

    After a system error, a replacement that has begun is finished or undone at once, if possible.
    """
    path, facts = replica.path, replica.facts
    if facts.log_end_offset != record.base_offset:
        raise KeytailError(
            f"the log end offset is {facts.log_end_offset} instead of {record.base_offset}; nothing was changed",
            path=path,
            remedy=WRITTEN_TO,
            slug="log-end-offset-changed",
        )
    refuse_lost(fs, path)
    like = fs.stat(path)
    if replica.topic_id is None:
        replace_file(fs, os.path.join(path, names.PARTITION_METADATA), encode_topic_id(plan.topic_id), like)
    epochs = with_epoch(replica.epochs, plan.leader_epoch, record.base_offset)
    if epochs != replica.epochs:
        write_epochs(fs, os.path.join(path, names.LEADER_EPOCHS), epochs, like)
    producers = producers_at_end(fs, facts)
    if facts.segments[-1].base_offset != record.base_offset:
        make_empty_segment(fs, path, record.base_offset, like)
    snapshots = []
    for offset in (*record.segment_bases[1:], record.end_offset):
        name = names.scratch_file(offset, run_id, _ATTEMPT, names.SNAPSHOT)
        fs.write_file(os.path.join(path, name), producers, like)
        snapshots.append(SnapshotFile(offset, name))
    _write_record(fs, path, record)
    try:
        commit_group(fs, path, GroupOutput((record.base_offset,), tuple(segments), tuple(snapshots)))
    except OSError:
        with contextlib.suppress(OSError, KeytailError):  # if this fails, the next run or a broker recovers
            recover(fs, path)
        raise


def _copied(fs: FileSystem, source: str, target: str, base_offset: int, run_id: str) -> OutputSegment:
    """Copy a committed segment's files, with their mtimes, to durable scratch files in the directory `target`."""
    like = fs.stat(target)
    files = []
    for suffix in (names.LOG, names.INDEX, names.TIME_INDEX):
        origin = os.path.join(source, names.segment_file(base_offset, suffix))
        name = names.scratch_file(base_offset, run_id, _ATTEMPT, suffix)
        size_bytes = copy_file(fs, origin, os.path.join(target, name), like)
        files.append(CleanFile(suffix, name, size_bytes, ""))
    return OutputSegment(base_offset, tuple(files))


def _move_checkpoints(fs: FileSystem, facts: PartitionFacts, end_offset: int) -> None:
    """Raise recovery point and high watermark to `end_offset`: everything below that offset is durable on all replicas.
    A higher offset, from a broker that ran meanwhile, is not changed."""
    key = (facts.topic, facts.partition)
    for name in (names.RECOVERY_POINT_CHECKPOINT, names.HIGH_WATERMARK_CHECKPOINT):
        path = os.path.join(facts.log_dir, name)
        if read_offsets(fs, path).get(key, -1) < end_offset:
            update_offset(fs, path, key, end_offset, hosted=None)


def _write_record(fs: FileSystem, path: str, record: ImportRecord) -> None:
    replace_file(fs, os.path.join(path, names.IMPORT_RECORD), record.encode(), fs.stat(path))
