"""Decides whether and how records may be appended to a partition without its leader.

Functions that take a file system read small files; all other functions are pure. IMPORT.md beside this file has the
rules with their reasons and every state on disk; `install.py` carries out the plan.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from keytail.errors import CorruptLog, ErrorText, KeytailError, Refused, refusal
from keytail.format import names
from keytail.format.batch import BATCH_HEADER, HEADER_BYTES
from keytail.format.producers import check_snapshot, encode_snapshot
from keytail.log.append.closed_log import unclosed_indexes
from keytail.log.checkpoint import read_epochs
from keytail.log.cluster.metadata import read_topic_id
from keytail.log.fs import FileSystem
from keytail.log.import_record import ImportRecord, parse_record
from keytail.log.partition import PartitionFacts, reasons_against_change
from keytail.rebuild_index.epochs import Epoch

FIRST_LEADER_EPOCH = 0  # the epoch that KRaft gives a new partition

@dataclass(frozen=True, slots=True)
class Rules:
    """The topic's settings that limit records and segments."""

    compacted: bool
    remote_storage_enable: bool
    segment_bytes: int
    segment_index_bytes: int
    index_interval_bytes: int
    max_message_bytes: int
    log_append_time: bool


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """One replica. `record`: the record of the replica's last import, if any. `has_first_batch`: the log has the first
    batch of that import."""

    facts: PartitionFacts
    epochs: tuple[Epoch, ...]
    topic_id: str | None
    record: ImportRecord | None
    has_first_batch: bool

    @property
    def path(self) -> str:
        return self.facts.path


ReplicaState = Literal["new", "committed", "done"]


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """The plan for one partition: its replicas, and their `states` in the same order. Tasks write only the first
    replica.

    Records get the offsets from `base_offset` on and the epoch `leader_epoch`. `record` is set if a replica already has
    the import with this id; then tasks write nothing, and the replicas without the import get copies.
    """

    topic: str
    partition: int
    replicas: tuple[ReplicaFacts, ...]
    states: tuple[ReplicaState, ...]
    base_offset: int
    leader_epoch: int
    topic_id: str
    record: ImportRecord | None

    @property
    def path(self) -> str:
        return self.replicas[0].path

    @property
    def is_done(self) -> bool:
        return all(state == "done" for state in self.states)


def survey_replica(fs: FileSystem, facts: PartitionFacts) -> ReplicaFacts:
    """Read leader epochs, topic id and import record of a replica. Raises CorruptLog if one of the files is invalid."""
    path = os.path.join(facts.path, names.IMPORT_RECORD)
    record = None
    if fs.exists(path):
        try:
            record = parse_record(fs.read_bytes(path, whole=True))
        except ValueError as error:
            raise CorruptLog(
                f"the record of the last import cannot be read: {error}",
                path=path,
                remedy="Find out with `keytail dump` whether the log contains that import, then remove this file",
                slug="invalid-import-record",
            ) from error
    return ReplicaFacts(
        facts,
        tuple(read_epochs(fs, os.path.join(facts.path, names.LEADER_EPOCHS))),
        read_topic_id(fs, facts.path),
        record,
        record is not None and _has_first_batch(fs, facts, record),
    )


def _has_first_batch(fs: FileSystem, facts: PartitionFacts, record: ImportRecord) -> bool:
    segment = next((item for item in facts.segments if item.base_offset == record.base_offset), None)
    if segment is None or segment.log_bytes < HEADER_BYTES:
        return False
    path = os.path.join(facts.path, names.segment_file(segment.base_offset, names.LOG))
    data = fs.read_at(path, 0, HEADER_BYTES)
    if len(data) < HEADER_BYTES:
        raise KeytailError(
            "the file became shorter while it was read",
            path=path,
            remedy="Find out what truncated the file, then run again",
            slug="file-became-shorter",
        )
    header = np.frombuffer(data, BATCH_HEADER)[0]
    return (int(header["base_offset"]), int(header["crc"])) == (record.base_offset, record.first_crc)


def refusals(facts: PartitionFacts, rules: Rules) -> list[ErrorText]:
    """Return the reasons why nothing may be appended to this replica, with remedies; empty if there are none."""
    reasons = [*facts.problems, *reasons_against_change(facts, rules.remote_storage_enable)]
    if not facts.clean_shutdown:
        reasons.append(
            refusal(
                f"the broker of {facts.log_dir} did not stop cleanly ({names.CLEAN_SHUTDOWN} is missing), so its log "
                "end is uncertain: start the broker, stop it cleanly, then import",
                slug="unclean-shutdown",
            )
        )
    if facts.tail_bytes:
        reasons.append(
            refusal(
                f"the log ends with {facts.tail_bytes} bytes that are not a complete batch: start and stop the broker, "
                "or see `keytail rebuild-index --truncate`",
                slug="incomplete-last-batch",
            )
        )
    return reasons


def plan_import(
    replicas: Sequence[ReplicaFacts], import_id: str, *, append: bool, topic_id: str | None
) -> ImportPlan:
    """Return the plan for the `replicas` of one partition, for which `refusals` must have returned no reasons.
    `topic_id` is the id from --topic-id or the metadata log.

    Raises Refused if an import would lose or duplicate records, or leave the replicas permanently different.
    """
    first = replicas[0].facts
    states = tuple(_state(replica, import_id) for replica in replicas)
    record = next((item.record for item, state in zip(replicas, states, strict=True) if state != "new"), None)
    base_offset = first.log_end_offset if record is None else record.base_offset
    for replica, state in zip(replicas, states, strict=True):
        if state == "new" and replica.facts.log_end_offset != base_offset:
            raise Refused(
                f"the replicas have different log end offsets: {replica.facts.log_end_offset} here, and {base_offset} "
                f"in {first.path}",
                path=replica.path,
                remedy="Start the brokers, wait until no partition is under-replicated, stop them, and run again",
                slug="log-end-offsets-differ",
            )
    if record is None and not append and first.log_end_offset != first.log_start_offset:
        raise Refused(
            f"the partition is not empty: its log start offset is {first.log_start_offset}, and its log end offset is "
            f"{first.log_end_offset}",
            path=first.path,
            remedy="To append the records to the partition, give --append",
            slug="partition-not-empty",
        )
    return ImportPlan(
        topic=first.topic,
        partition=first.partition,
        replicas=tuple(replicas),
        states=states,
        base_offset=base_offset,
        leader_epoch=newest_epoch(replicas, base_offset),
        topic_id=_topic_id(replicas, topic_id),
        record=record,
    )


def _state(replica: ReplicaFacts, import_id: str) -> ReplicaState:
    record = replica.record
    if record is None or record.import_id != import_id:
        return "new"
    if record.progress == "done":
        return "done"
    if replica.has_first_batch:
        return "committed"
    if replica.facts.log_end_offset == record.base_offset:
        return "new"
    raise Refused(
        f"import {import_id} was interrupted here, and the partition has changed since: it cannot be determined "
        f"whether the records from offset {record.base_offset} to before {record.end_offset} are of that import",
        path=replica.path,
        offset=record.base_offset,
        remedy="Look at these records with `keytail lookup` or `keytail dump`. If these records were imported, leave "
        f"out this partition; if not, remove {names.IMPORT_RECORD} from the directory and run again",
        slug="import-state-unknown",
    )


def newest_epoch(replicas: Sequence[ReplicaFacts], log_end_offset: int) -> int:
    """Return the leader epoch for imported batches: the latest epoch of any replica, or FIRST_LEADER_EPOCH if no
    replica has an epoch. Raises Refused if the last epoch of a replica begins above the log end."""
    for replica in replicas:
        if replica.epochs and replica.epochs[-1][1] > log_end_offset:
            raise Refused(
                f"leader epoch {replica.epochs[-1][0]} begins at offset {replica.epochs[-1][1]}, above the log end "
                f"offset {log_end_offset}",
                path=os.path.join(replica.path, names.LEADER_EPOCHS),
                remedy="Start and stop the broker, which repairs the file, or run `keytail rebuild-index --execute`",
                slug="leader-epoch-above-log-end",
            )
    return max((epoch for replica in replicas for epoch, _ in replica.epochs), default=FIRST_LEADER_EPOCH)


def with_epoch(epochs: Sequence[Epoch], leader_epoch: int, base_offset: int) -> tuple[Epoch, ...]:
    """Return `epochs` of a replica with an entry for batches of `leader_epoch` from `base_offset` on."""
    if epochs and epochs[-1][0] >= leader_epoch:
        return tuple(epochs)
    # As in a broker, an older epoch that begins at the same offset is removed: that epoch has no records.
    return (*(entry for entry in epochs if entry[1] < base_offset), (leader_epoch, base_offset))


def _topic_id(replicas: Sequence[ReplicaFacts], given: str | None) -> str:
    found = {replica.topic_id: replica.path for replica in replicas if replica.topic_id is not None}
    if given is not None:
        found.setdefault(given, "from --topic-id or the metadata log")
    if len(found) > 1:
        listed = ", ".join(f"{topic_id} ({where})" for topic_id, where in found.items())
        raise Refused(
            f"the topic ids differ: {listed}", remedy="Give the log dirs of one cluster", slug="topic-id-differs"
        )
    if not found:
        raise Refused(
            f"the directory has no {names.PARTITION_METADATA}, and a broker with KRaft would treat it as stray",
            path=replicas[0].path,
            remedy="Give the topic id with --topic-id (kafka-topics.sh --describe shows it). With ZooKeeper and "
            "inter.broker.protocol.version below 2.8, topics have no id: produce the records instead",
            slug="no-topic-id",
        )
    return next(iter(found))


def producers_at_end(fs: FileSystem, facts: PartitionFacts) -> bytes:
    """Return the bytes of the producer snapshot at the log end or, if there are no snapshots above the log start, of an
    empty snapshot: a broker then assumes that there are no producers. Raises Refused if the snapshot at the log end is
    invalid, or is missing although there are older ones. Imported records have no producer, so the snapshots of an
    import have the same bytes.
    """
    usable = [offset for offset in facts.snapshots if offset > facts.log_start_offset]
    path = os.path.join(facts.path, names.segment_file(facts.log_end_offset, names.SNAPSHOT))
    if not usable:
        return encode_snapshot(())
    problem = "the file is missing, although there are older snapshots"
    if facts.log_end_offset in usable:
        data = fs.read_bytes(path, whole=True)
        try:
            check_snapshot(data)
            return data
        except ValueError as error:
            problem = str(error)
    raise Refused(
        f"no valid producer snapshot at the log end offset: {problem}",
        path=path,
        remedy="Run `keytail rebuild-index --execute`, which rebuilds the snapshot, or start and stop the broker",
        slug="no-producer-snapshot",
    )


def refuse_unclosed(fs: FileSystem, facts: PartitionFacts) -> None:
    """Raise Refused unless the indexes of the active segment are as a broker leaves them when it stops or rolls.

    The roll of an import does not trim the indexes: with zeros at the end of a time index, retention would delete the
    segment; without the last entry, retention could delete the segment too early.
    """
    segment = facts.segments[-1]
    why = unclosed_indexes(fs, facts.path, segment)
    if why:
        raise Refused(
            f"the indexes of the active segment are not as a broker leaves them when it stops: {why}",
            path=os.path.join(facts.path, names.segment_file(segment.base_offset, names.LOG)),
            offset=segment.base_offset,
            remedy="Run `keytail rebuild-index --execute` first",
            slug="indexes-not-closed",
        )
