"""Reads all replicas of one partition for a cut, compares them, and collects the values that constrain the cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from keytail.cut.agreement import agreement
from keytail.cut.cluster import Host, Hosted
from keytail.cut.coordinators import GROUPS_TOPIC, TRANSACTIONS_TOPIC, commits_of, states_of
from keytail.cut.fixed_point import Blocks, Commit
from keytail.cut.scan import Scan, pieces_of, scan
from keytail.cut.transactions import Piece, State, merged
from keytail.errors import Refused
from keytail.format.batch import CONTROL
from keytail.log.fs import FileSystem
from keytail.log.partition import PartitionFacts, survey_partition
from keytail.log.records.chunk import SegmentReader

R = TypeVar("R", State, Commit)


@dataclass(frozen=True)
class ReplicaLog:
    """The log of a replica: its log end offset, the last offset of each batch (int64, ascending), and the offset up to
    which it agrees with all in-sync replicas (the log end offset if it is in sync itself: `Examined.limit` then
    applies). `torn` is a sentence about a torn end, or empty."""

    host: Host
    facts: PartitionFacts
    end_offset: int
    last_offsets: np.ndarray
    agrees_to: int
    torn: str = ""

    def batches_below(self, offset: int) -> int:
        """Return the number of batches that end below the offset."""
        return int(np.searchsorted(self.last_offsets, offset))


@dataclass(frozen=True)
class Examined:
    """A partition, and the values that constrain its cut. `limit` is the offset below which all in-sync replicas agree
    and no batch has a leader epoch that the metadata log lacks; `limited_by` states the reason, and is empty if no
    in-sync replica has a record above the limit.

    `counts` (int64) has the number of records, 0 for control batches, of each batch of the longest in-sync replica,
    which is `logs[longest]`. `may_have_lost_markers` is set if every in-sync log has gaps.
    """

    hosted: Hosted
    logs: tuple[ReplicaLog, ...]
    limit: int
    limited_by: str
    blocks: Blocks
    may_have_lost_markers: bool
    longest: int
    counts: np.ndarray
    pieces: tuple[Piece, ...] = ()
    states: tuple[State, ...] = ()
    commits: tuple[Commit, ...] = ()

    def common_source(self, cut: int) -> ReplicaLog | None:
        """Return the replica from whose log all replicas are written, or None if each is written from its own log.

        All replicas need the same source if cleaning or retention of any replica passed the cut: it may have removed
        records below the cut that other replicas have.
        """
        reached = (max(log.facts.cleaner_checkpoint or 0, log.facts.log_start_offset) for log in self.logs)
        if cut == 0 or max(reached) <= cut:
            return None
        in_sync = (log for log in self.logs if log.host.is_in_sync)
        return max(in_sync, key=lambda log: (log.batches_below(cut), -(log.facts.cleaner_checkpoint or 0)))

    def notes(self, cut: int) -> tuple[str, ...]:
        """Return the notes about the partition. If all replicas are written from one log, the last note names it."""
        source = self.common_source(cut)
        if source is None:
            return self.hosted.notes
        name, cleaned_to = source.host.node.replica.name, source.facts.cleaner_checkpoint or 0
        text = f"all replicas are written from the log of {name}, because cleaning or retention passed the cut"
        if cleaned_to > cut:
            text += (
                f"; that log was cleaned up to offset {cleaned_to}, so records below the cut are lost if a record "
                "above the cut has their key"
            )
        return (*self.hosted.notes, text)

    def records_above(self, cut: int) -> int:
        """Return how many records, without markers, the longest in-sync replica has at and above the cut."""
        return int(self.counts[np.searchsorted(self.logs[self.longest].last_offsets, cut) :].sum())


def examine(fs: FileSystem, reader: SegmentReader, hosted: Hosted) -> Examined:
    """Read and compare all replicas of the partition, and return the result. Raises KeytailError if a replica is
    damaged, in a state that is not supported, or different from another one."""
    scans = [scan(fs, reader, survey_partition(fs, host.log_dir, host.entry)) for host in hosted.hosts]
    in_sync = [n for n, host in enumerate(hosted.hosts) if host.is_in_sync]
    limit, limited_by = _limit(hosted, scans, in_sync)
    logs = tuple(
        ReplicaLog(
            host,
            one.facts,
            one.end_offset,
            one.table["last_offset"].copy(),
            one.end_offset if host.is_in_sync else _agrees_to(one, [scans[n] for n in in_sync]),
            one.torn,
        )
        for host, one in zip(hosted.hosts, scans, strict=True)
    )
    longest = max(in_sync, key=lambda n: scans[n].end_offset)
    table = scans[longest].table
    shorter = [scans[n].table for n in in_sync if n != longest]
    topic, _ = hosted.key
    states: list[State] = []
    commits: list[Commit] = []
    for n in in_sync:
        if topic == TRANSACTIONS_TOPIC:
            states += states_of(reader, scans[n])
        elif topic == GROUPS_TOPIC:
            commits += commits_of(reader, scans[n], pieces_of(scans[n].table))
    return Examined(
        hosted,
        logs,
        limit,
        limited_by,
        Blocks.union(_ranges(scans[n].table) for n in in_sync),
        all(scans[n].has_gaps for n in in_sync),
        longest,
        np.where(table["attributes"] & CONTROL, 0, table["record_count"]).astype(np.int64),
        tuple(merged(pieces_of(table), (pieces_of(other[other["last_offset"] < limit]) for other in shorter), limit)),
        _union(states),
        _union(commits),
    )


def _union(found: Iterable[R]) -> tuple[R, ...]:
    """Return the union of the records that the replicas have, ascending by offset: compaction removes records from the
    replicas at different times."""
    by_offset = {one.record_offset: one for one in found}
    return tuple(by_offset[offset] for offset in sorted(by_offset))


def _ranges(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the start and the end offset of each batch that a cut could divide."""
    several = table[table["last_offset"] > table["base_offset"]]
    return several["base_offset"], several["last_offset"] + 1


def _limit(hosted: Hosted, scans: Sequence[Scan], in_sync: Sequence[int]) -> tuple[int, str]:
    """Return the offset up to which all in-sync replicas agree and have only leader epochs of the metadata log, and a
    sentence with the reason, or "". Raises Refused if two replicas have different bytes in the same batch."""
    name = [host.node.replica.name for host in hosted.hosts]
    shortest = min(in_sync, key=lambda n: scans[n].end_offset)
    limit, limited_by = scans[shortest].end_offset, f"replica {name[shortest]} ends at this offset"
    if all(scans[n].end_offset == limit for n in in_sync):
        limited_by = ""
    for a, b in itertools.combinations(in_sync, 2):
        found = agreement(scans[a].table, scans[a].end_offset, scans[b].table, scans[b].end_offset)
        if found.bytes_differ_at is not None:
            raise Refused(
                f"replicas {name[a]} and {name[b]} have different bytes in the same batch",
                path=scans[a].facts.path,
                offset=found.bytes_differ_at,
                remedy="Compare the replicas with `keytail audit`, and leave out the log dirs of the wrong one or "
                "restore its partition from another snapshot",
                slug="replicas-differ",
            )
        if found.end_offset < limit:
            limit = found.end_offset
            limited_by = f"replicas {name[a]} and {name[b]} have different leader epochs at this offset"
    for n in in_sync:
        table = scans[n].table
        later = np.flatnonzero(table["leader_epoch"] > hosted.leader_epoch)
        if len(later) and table["base_offset"][later[0]] < limit:
            limit = int(table["base_offset"][later[0]])
            epoch = table["leader_epoch"][later[0]]
            limited_by = f"leader epoch {epoch}, which the metadata log lacks, begins at this offset"
    return limit, limited_by


def _agrees_to(one: Scan, in_sync: Sequence[Scan]) -> int:
    """Return the offset up to which a replica that is not in sync agrees with the in-sync ones in bytes and epochs."""
    found = [agreement(one.table, one.end_offset, other.table, other.end_offset) for other in in_sync]
    ends = (each.end_offset if each.bytes_differ_at is None else each.bytes_differ_at for each in found)
    return min(ends, default=one.end_offset)
