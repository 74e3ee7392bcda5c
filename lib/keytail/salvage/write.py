"""Writes the directory of a new partition, for `salvage` and `cut`: segments, then the files derived from them. The
directory is renamed last.

Until the directory is complete, it has a name with which a broker fails at startup, so that it is never used as a
partition. Everything is durable before the final rename.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from keytail.errors import KeytailError, Refused, joined
from keytail.format import names
from keytail.format.metadata import encode_topic_id
from keytail.format.producers import check_snapshot, encode_snapshot
from keytail.log.checkpoint import read_epochs, write_epochs
from keytail.log.cluster.metadata import read_topic_id
from keytail.log.fs import FileStat, FileSystem
from keytail.log.partition import LogDirFacts, PartitionEntry, survey_partition
from keytail.log.producers import load_producers
from keytail.rebuild_index.epochs import plan_epochs
from keytail.rebuild_index.indexes import SegmentResult, index_segment
from keytail.rebuild_index.partition import (
    PartitionPlan,
    RebuildSettings,
    install,
    plan_partition,
    repair_rest,
    segment_tasks,
    settle,
)
from keytail.rebuild_index.snapshots import put_snapshot

UNFINISHED = ".unfinished"


class NewPartition:
    """A partition that is being written: call `add_segment` in the order of base offsets, then `finish`."""

    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        source: PartitionEntry,
        settings: RebuildSettings,
        topic_id: str | None,
    ) -> None:
        """`settings` have the topic's settings for indexes, `execute`, and the id of the run; `topic_id` is used if the
        source has no topic id. Nothing is created before the first segment."""
        self._fs, self._directory, self._source = fs, directory, source
        self._settings, self._topic_id = settings, topic_id
        name = names.partition_dir(source.topic, source.partition)
        self.final_path = os.path.join(directory, name)
        self.path = f"{self.final_path}.{settings.run_id}{UNFINISHED}"
        self._is_made = False
        self._bases: list[int] = []
        self._last_like: FileStat | None = None

    def _make(self) -> None:
        if self._is_made:
            return
        if self._fs.exists(self.final_path):
            raise Refused(
                "the output directory already contains this partition",
                path=self.final_path,
                remedy="Give an empty directory",
                slug="partition-exists-in-target",
            )
        like = possible_like(self._fs, self._fs.stat(self._source.path)) or self._fs.stat(self._directory)
        self._fs.mkdir(self.path, like)
        self._is_made = True

    def add_segment(self, base_offset: int, runs: Iterable[np.ndarray], source: FileStat) -> None:
        """Write the segment's `.log` from these runs of bytes, with mtime and owner of the source file."""
        self._make()
        path = os.path.join(self.path, names.segment_file(base_offset, names.LOG))
        fd = self._fs.create(path, possible_like(self._fs, source))
        try:
            for run in runs:
                self._fs.write(fd, run)
            self._fs.set_mtime_ns(path, source.mtime_ns)
            self._fs.fsync(fd)
        finally:
            self._fs.close(fd)
        self._bases.append(base_offset)
        self._last_like = source

    def add_empty_segment(self, base_offset: int) -> None:
        """Add an empty segment at the end, whose base offset is the log end offset."""
        self._make()
        like = self._last_like or self._fs.stat(self._source.path)
        path = os.path.join(self.path, names.segment_file(base_offset, names.LOG))
        self._fs.write_file(path, b"", possible_like(self._fs, like))
        self._bases.append(base_offset)

    def finish(self, snapshots: Sequence[int]) -> list[str]:
        """Write indexes, snapshots and small files durably, then rename the directory. Returns notes on files that are
        missing or were rebuilt. Raises KeytailError if the written logs are damaged."""
        notes = self._copy_metadata()
        self._copy_snapshots(snapshots)
        plan = self._plan()
        results = [index_segment(self._fs, task) for task in segment_tasks(plan)]
        for result in results:
            if result.damage is not None:
                raise KeytailError(
                    f"the written segment is damaged: {result.damage}",
                    path=self.path,
                    remedy="The likely cause is a disk that changes bytes: check the kernel log, and give an output "
                    "directory on another disk",
                    slug="damaged-output",
                )
        notes += self._put_epochs(results)
        settled = settle(self._fs, plan, results)
        install(self._fs, plan, settled)
        notes += repair_rest(self._fs, plan, settled).refused
        notes += self._put_last_snapshot(plan, settled.log_end_offset)
        self._fs.fsync_dir(self.path)
        self._fs.rename(self.path, self.final_path)
        self._fs.fsync_dir(self._directory)
        return notes

    def _plan(self) -> PartitionPlan:
        """Return the plan that `rebuild-index` would have for the new partition, in a log dir without checkpoints."""
        source = self._source
        log_dir = LogDirFacts(self._directory, (), (), False, {}, {}, {}, {})
        entry = PartitionEntry(source.topic, source.partition, self._directory, self.path)
        facts = survey_partition(self._fs, log_dir, entry)
        if facts.problems:
            raise KeytailError(
                f"the new directory cannot be read: {joined(facts.problems)}",
                path=self.path,
                remedy="Check the disk, remove the output, then run again",
                slug="unreadable-output",
            )
        return plan_partition(self._fs, facts, self._settings)

    def _copy_metadata(self) -> list[str]:
        """Copy or write `partition.metadata`, without which a broker treats the directory as stray. Returns notes."""
        target = os.path.join(self.path, names.PARTITION_METADATA)
        source = os.path.join(self._source.path, names.PARTITION_METADATA)
        like = possible_like(self._fs, self._fs.stat(self._source.path))
        data = None
        try:
            if read_topic_id(self._fs, self._source.path) is not None:
                data, source_like = self._fs.read_bytes(source), possible_like(self._fs, self._fs.stat(source))
            why = f"the source has no {names.PARTITION_METADATA}"
        except (KeytailError, OSError) as problem:
            data, why = None, f"{names.PARTITION_METADATA} cannot be read ({problem})"
        if data is not None:
            self._fs.write_file(target, data, source_like)
            return []
        if self._topic_id is not None:
            self._fs.write_file(target, encode_topic_id(self._topic_id), like)
            return [f"{why}; the file was created with the topic ID from the metadata log"]
        return [
            f"{why}: the new directory lacks this file, so a broker treats the directory as stray. Create the file "
            f"with the topic ID "
            "that kafka-topics.sh --describe shows: 'version: 0', a line feed, 'topic_id: ' and the ID, without a line "
            "feed at the end"
        ]

    def _copy_snapshots(self, snapshots: Sequence[int]) -> None:
        """Copy the valid snapshots up to the last base offset: they contain state from batches that the log has
        lost."""
        for offset in snapshots:
            name = names.segment_file(offset, names.SNAPSHOT)
            path = os.path.join(self._source.path, name)
            try:
                data = self._fs.read_bytes(path)
                check_snapshot(data)
                like = self._fs.stat(path)
            except (ValueError, OSError):
                continue
            if offset <= self._bases[-1] or offset in self._bases:
                self._fs.write_file(os.path.join(self.path, name), data, possible_like(self._fs, like))

    def _put_last_snapshot(self, plan: PartitionPlan, log_end_offset: int) -> list[str]:
        """Write a snapshot of the producers at the log end, as a broker that recovers the log finds them, unless there
        is one or the log is empty; return notes.

        Without any snapshot, a broker that starts after a clean shutdown assumes no producers and no open transactions.
        """
        snapshots = [
            name.base_offset
            for name in (names.parse_file_name(entry.name) for entry in self._fs.scan(self.path))
            if name.suffix == names.SNAPSHOT and name.base_offset is not None
        ]
        facts = plan.facts
        if log_end_offset in snapshots or log_end_offset <= facts.log_start_offset:
            return []
        log = replace(facts, snapshots=tuple(snapshots), log_end_offset=log_end_offset, clean_shutdown=False)
        producers = load_producers(self._fs, None, self.path, log, expiration_ms=names.MAX_OFFSET, now_ms=0)
        data = encode_snapshot(producers.entries())
        last_log = os.path.join(self.path, names.segment_file(facts.segments[-1].base_offset, names.LOG))
        like = self._fs.stat(last_log)
        put_snapshot(
            self._fs, self.path, log_end_offset, data, like=like, run_id=self._settings.run_id, attempt="end"
        )
        if snapshots:
            return []
        return [
            f"no valid snapshot exists: the {len(producers.states)} producers at the log end are those in the log"
        ]

    def _put_epochs(self, results: Sequence[SegmentResult]) -> list[str]:
        """Write the source's leader epochs unless the log contradicts them; return notes. Newer epochs are added
        later."""
        seen = [epoch for result in results for epoch in result.epochs]
        path = os.path.join(self._source.path, names.LEADER_EPOCHS)
        try:
            entries = read_epochs(self._fs, path)
            problem = plan_epochs(entries, seen, names.MAX_OFFSET).problem
        except (KeytailError, OSError) as error:
            entries, problem = [], str(error)
        if problem:
            return [f"{names.LEADER_EPOCHS} is rebuilt from the log: {problem}"]
        if entries:
            like = possible_like(self._fs, self._fs.stat(path))
            write_epochs(self._fs, os.path.join(self.path, names.LEADER_EPOCHS), entries, like)
        return []


def possible_like(fs: FileSystem, stat: FileStat) -> FileStat | None:
    """Return `stat`, or None if this process cannot give files the owner in `stat`; the operator then sets the owner
    later."""
    try:
        fs.refuse_unless_like(stat)
    except Refused:
        return None
    return stat
