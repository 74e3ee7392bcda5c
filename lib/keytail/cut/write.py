"""Writes the log dirs of a cut (CUT.md, "What is written").

A log dir gets its partitions first, then the metadata log and the checkpoints, and `meta.properties` last: a broker
does not start on a log dir without this file, so it never starts on an unfinished output. All files are durable.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from keytail.cut.cluster import Hosted, Node
from keytail.cut.fixed_point import PartitionKey
from keytail.cut.partition import ReplicaLog
from keytail.errors import KeytailError
from keytail.format import names
from keytail.log.checkpoint import write_offsets
from keytail.log.cluster.metadata import METADATA_DIR, ClusterMetadata, read_metadata
from keytail.log.copying import copy_file
from keytail.log.fs import FileSystem
from keytail.log.partition import LogDirFacts, SegmentFacts, refuse_changed
from keytail.log.records.chunk import SegmentReader
from keytail.rebuild_index.partition import RebuildSettings
from keytail.salvage.write import NewPartition, possible_like

_METADATA_SUFFIXES = (*names.CONTENT_SUFFIXES, names.METADATA_SNAPSHOT)


@dataclass(frozen=True)
class Written:
    """A partition in the output. `log_start_offset` is None if it is the base offset of the first segment. `cleaned_to`
    is None if the source has no cleaner checkpoint. `notes` are about files that are missing or were rebuilt."""

    end_offset: int
    log_start_offset: int | None
    cleaned_to: int | None
    notes: tuple[str, ...]


def output_paths(output: str, nodes: Sequence[Node]) -> dict[str, str]:
    """Return the paths of the new log dirs, by the paths of the source's log dirs."""
    paths: dict[str, str] = {}
    for node in nodes:
        home = os.path.join(output, f"node-{node.node_id}")
        for facts in node.replica.log_dirs:
            name, number = os.path.basename(facts.path) or "data", 1
            path = os.path.join(home, name)
            while path in paths.values():
                number += 1
                path = os.path.join(home, f"{name}-{number}")
            paths[facts.path] = path
    return paths


def make_directories(fs: FileSystem, output: str, paths: Mapping[str, str]) -> None:
    """Create the output directory and a directory for each log dir."""
    wanted = [output, *(os.path.dirname(path) for path in paths.values()), *paths.values()]
    for path in dict.fromkeys(wanted):
        if not fs.exists(path):
            fs.mkdir(path, fs.stat(os.path.dirname(path)))
            fs.fsync_dir(os.path.dirname(path))


def write_partition(
    fs: FileSystem, reader: SegmentReader, log: ReplicaLog, hosted: Hosted, cut: int, directory: str, run_id: str
) -> Written:
    """Write the log of one replica below the cut as a new partition in the log dir `directory`; return what was
    written.

    Raises KeytailError if the source has changed since it was read, or the written files are damaged.
    """
    facts = log.facts
    end = min(cut, log.agrees_to)
    whole = log.last_offsets[: log.batches_below(end)]
    wanted_end = int(whole[-1]) + 1 if len(whole) else None
    settings = RebuildSettings(hosted.index_interval_bytes, hosted.segment_index_bytes, execute=True, run_id=run_id)
    new = NewPartition(fs, directory, log.host.entry, settings, hosted.topic_id)
    written = [np.empty(0, np.int64)]
    for segment in _segments_with(facts.segments, wanted_end):
        path = os.path.join(facts.path, names.segment_file(segment.base_offset, names.LOG))
        new.add_segment(segment.base_offset, _runs(reader, path, segment.log_bytes, end, written), fs.stat(path))
        refuse_changed(fs, path, segment.log_bytes, segment.log_mtime_ns)
    if not np.array_equal(np.concatenate(written), whole):
        raise KeytailError(
            f"the written batches differ from the batches that were read before, up to offset {wanted_end}",
            path=facts.path,
            remedy="Another process writes to this directory, or its disk changes bytes: stop the process, remove the "
            "output, then run again",
            slug="source-changed",
        )
    if wanted_end is None or (log.host.is_in_sync and wanted_end < end):
        wanted_end = end
        new.add_empty_segment(end)
    snapshots = [offset for offset in facts.snapshots if offset <= wanted_end]
    notes = new.finish(snapshots)
    has_later_start = facts.log_start_offset > facts.segments[0].base_offset
    cleaned_to = facts.cleaner_checkpoint
    return Written(
        wanted_end,
        min(facts.log_start_offset, wanted_end) if has_later_start else None,
        None if cleaned_to is None else min(cleaned_to, wanted_end),
        tuple(notes),
    )


def _segments_with(segments: Sequence[SegmentFacts], end: int | None) -> Sequence[SegmentFacts]:
    """Return the segments that begin below `end`, the end offset of the last batch; none if `end` is None."""
    return [] if end is None else [segment for segment in segments if segment.base_offset < end]


def _runs(
    reader: SegmentReader, path: str, log_bytes: int, end_offset: int, written: list[np.ndarray]
) -> Iterator[np.ndarray]:
    """Yield the bytes of the batches below `end_offset`; append the last offsets of the batches to `written`."""
    for chunk in reader.chunks(path, log_bytes, torn_tail=True):
        count = int(np.searchsorted(chunk.table["last_offset"], end_offset))
        written.append(chunk.table["last_offset"][:count].copy())
        if count < len(chunk.table):
            yield chunk.raw[: int(chunk.table["position"][count]) - chunk.position]
            return
        yield chunk.raw


def write_rest(
    fs: FileSystem,
    node: Node,
    metadata: ClusterMetadata,
    paths: Mapping[str, str],
    written: Mapping[str, Mapping[PartitionKey, Written]],
) -> None:
    """Write the metadata log, the checkpoints and the other files of the node's log dirs. `written` has the partitions
    in each log dir of the source."""
    for facts in node.replica.log_dirs:
        target = paths[facts.path]
        if node.metadata is not None and os.path.dirname(node.metadata.path) == facts.path:
            _copy_metadata(fs, node.metadata.path, metadata, os.path.join(target, METADATA_DIR))
        _write_checkpoints(fs, target, facts, written.get(facts.path, {}))
        _copy_if_there(fs, facts.path, target, names.BOOTSTRAP_SNAPSHOT)
        epoch = metadata.broker_epochs.get(node.node_id, -1)
        content = json.dumps({"version": 0, "brokerEpoch": epoch}, separators=(",", ":")).encode()
        fs.write_file(os.path.join(target, names.CLEAN_SHUTDOWN), content, possible_like(fs, fs.stat(facts.path)))
        fs.fsync_dir(target)


def finish(fs: FileSystem, nodes: Sequence[Node], paths: Mapping[str, str]) -> None:
    """Write the `meta.properties` of each log dir, which completes the output."""
    for node in nodes:
        for facts in node.replica.log_dirs:
            _copy_if_there(fs, facts.path, paths[facts.path], names.META_PROPERTIES)
            fs.fsync_dir(paths[facts.path])


def _write_checkpoints(
    fs: FileSystem, target: str, facts: LogDirFacts, partitions: Mapping[PartitionKey, Written]
) -> None:
    like = possible_like(fs, fs.stat(facts.path))
    ends = {key: one.end_offset for key, one in partitions.items()}
    starts = {key: one.log_start_offset for key, one in partitions.items() if one.log_start_offset is not None}
    cleaned = {key: one.cleaned_to for key, one in partitions.items() if one.cleaned_to is not None}
    for name, entries in (
        (names.RECOVERY_POINT_CHECKPOINT, ends),
        (names.HIGH_WATERMARK_CHECKPOINT, ends),
        (names.LOG_START_CHECKPOINT, starts),
        (names.CLEANER_CHECKPOINT, cleaned),
    ):
        write_offsets(fs, os.path.join(target, name), entries, like)


def _copy_metadata(fs: FileSystem, own: str, newest: ClusterMetadata, target: str) -> None:
    """Copy the newest metadata log and the node's own `quorum-state`. Raises KeytailError if the copy differs."""
    fs.mkdir(target, fs.stat(os.path.dirname(target)))
    for entry in sorted(fs.scan(newest.path), key=lambda entry: entry.name):
        is_part = entry.name.endswith(_METADATA_SUFFIXES) or entry.name in names.PARTITION_FILES
        if is_part and entry.is_regular:
            source = os.path.join(newest.path, entry.name)
            copy_file(fs, source, os.path.join(target, entry.name), possible_like(fs, fs.stat(source)))
    _copy_if_there(fs, own, target, names.QUORUM_STATE)
    fs.fsync_dir(target)
    fs.fsync_dir(os.path.dirname(target))
    copy = read_metadata(fs, target, -1, (), torn_tail=True)
    if (copy.as_of_epoch, copy.as_of_offset, copy.topics) != (newest.as_of_epoch, newest.as_of_offset, newest.topics):
        raise KeytailError(
            f"the copy of the metadata log, which ends at offset {copy.as_of_offset}, differs from what was read "
            f"before, up to offset {newest.as_of_offset}",
            path=newest.path,
            remedy="Another process writes to this directory: stop it, remove the output, then run again",
            slug="metadata-copy-differs",
        )


def _copy_if_there(fs: FileSystem, source: str, target: str, name: str) -> None:
    path = os.path.join(source, name)
    if fs.exists(path):
        copy_file(fs, path, os.path.join(target, name), possible_like(fs, fs.stat(path)))
