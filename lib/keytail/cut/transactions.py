"""Joins the parts that transactions have in several partitions and in `__transaction_state`. Pure functions.

CUT.md, "Which parts belong to one transaction", has the rules. If the logs do not show whether a part exists, the
transaction is returned with and without it: the caller refuses unless both give the same cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from keytail.cut.fixed_point import Part, PartitionKey, Transaction

Decision = Literal["none", "prepared", "completed"]
# An epoch of a producer, with the kind of batches that have it: data or markers.
_Token: TypeAlias = tuple[Literal["data", "marker"], int]


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a transaction in the log of one partition. If the log has only the transaction's marker, `data_epoch`
    is None and `first_offset` is the offset of the marker. If the log has no marker, `marker_epoch` and `marker_offset`
    are None, and `marker_ms` is -1."""

    producer_id: int
    first_offset: int
    data_epoch: int | None = None
    marker_epoch: int | None = None
    marker_offset: int | None = None
    is_commit: bool = False
    marker_ms: int = -1


@dataclass(frozen=True, slots=True)
class State:
    """A record of `__transaction_state`. `start_ms` is when the transaction began, `update_ms` when the record was
    written, both by the coordinator's clock. `partitions` are the transaction's, or empty once it is completed."""

    record_offset: int
    producer_id: int
    producer_epoch: int
    decision: Decision
    start_ms: int
    update_ms: int
    partitions: tuple[PartitionKey, ...] = ()


Problem = Literal["", "not-distinguished", "marker-lost-or-not-written", "partitions-unknown"]


@dataclass(frozen=True)
class Joined:
    """A transaction, and the uncertainty about its parts.

    `lenient` is the transaction without its uncertain parts (CUT.md); None if it stands for several transactions that
    cannot be distinguished; equal to `transaction` if all parts are certain. `problem` names the uncertainty.
    """

    transaction: Transaction
    lenient: Transaction | None
    problem: Problem = ""


@dataclass
class _OfProducer:
    """The pieces and states of one producer in all logs."""

    pieces: list[tuple[PartitionKey, Piece]] = field(default_factory=list)
    states: list[tuple[PartitionKey, State]] = field(default_factory=list)
    latest_epochs: dict[PartitionKey, int] = field(default_factory=dict)  # largest epoch of data and markers, by log

    def add(self, key: PartitionKey, piece: Piece) -> None:
        self.pieces.append((key, piece))
        epochs = (self.latest_epochs.get(key), piece.data_epoch, piece.marker_epoch)
        self.latest_epochs[key] = max(epoch for epoch in epochs if epoch is not None)


@dataclass
class _Group:
    """Pieces and decisions of one transaction, or of several transactions that cannot be distinguished."""

    pieces: list[tuple[PartitionKey, Piece]] = field(default_factory=list)
    decisions: list[tuple[PartitionKey, State]] = field(default_factory=list)
    tokens: set[_Token] = field(default_factory=set)

    def epochs(self, kind: Literal["data", "marker"]) -> list[int]:
        return [epoch for name, epoch in self.tokens if name == kind]


def merged(longest: Sequence[Piece], others: Iterable[Sequence[Piece]], limit: int) -> list[Piece]:
    """Return the pieces of a partition from the logs of its in-sync replicas, which agree below `limit`.

    Compaction removes data from the replicas at different times, so the first offset of a piece is the smallest one in
    any replica. `others` are the pieces of the other replicas below the limit: if such a piece has no marker there, its
    marker is above the limit.
    """
    found: dict[tuple[int, int | None, int | None], Piece] = {}
    key: tuple[int, int | None, int | None]
    for piece in (*longest, *itertools.chain.from_iterable(others)):
        is_decided = piece.marker_offset is not None and piece.marker_offset < limit
        key = (piece.producer_id, piece.marker_offset, None)
        if not is_decided and piece.data_epoch is not None:
            # A producer has at most one transaction that is open at the limit; only the longest log has its marker.
            key = (piece.producer_id, None, piece.data_epoch)
        before = found.setdefault(key, piece)
        if piece.first_offset < before.first_offset or before.data_epoch is None:
            data_epoch = before.data_epoch if piece.data_epoch is None else piece.data_epoch
            first_offset = min(before.first_offset, piece.first_offset)
            found[key] = replace(before, first_offset=first_offset, data_epoch=data_epoch)
    return list(found.values())


def join(
    pieces: Mapping[PartitionKey, Sequence[Piece]],
    states: Mapping[PartitionKey, Sequence[State]],
    may_have_lost_markers: Mapping[PartitionKey, bool],
    complete_before_ms: int | None = None,
) -> list[Joined]:
    """Return the transactions. `pieces` has the pieces in the log of each partition, `states` the records of each
    partition of `__transaction_state`, both in the order of the log. `may_have_lost_markers` has, for every partition
    of the cluster, whether compaction or retention may have removed markers.

    A transaction that was decided before `complete_before_ms` is known to be complete in all its partitions.
    """
    producers: dict[int, _OfProducer] = {}
    for key, of_partition in pieces.items():
        for piece in of_partition:
            producers.setdefault(piece.producer_id, _OfProducer()).add(key, piece)
    for key, of_home in states.items():
        for state in of_home:
            producers.setdefault(state.producer_id, _OfProducer()).states.append((key, state))
    return [
        _joined(producer_id, producer, group, may_have_lost_markers, complete_before_ms)
        for producer_id, producer in sorted(producers.items())
        for group in _groups(producer)
    ]


def _groups(producer: _OfProducer) -> list[_Group]:
    """Divide a producer's pieces and decisions into groups that have no data epoch and no marker epoch in common."""
    group_of: dict[_Token, _Group] = {}

    def group_with(tokens: Iterable[_Token]) -> _Group:
        found = _Group()
        for token in tokens:
            other = group_of.get(token)
            if other is not None and other is not found:
                small, large = sorted((found, other), key=lambda group: len(group.tokens))
                large.pieces += small.pieces
                large.decisions += small.decisions
                large.tokens |= small.tokens
                for moved in small.tokens:
                    group_of[moved] = large
                found = large
            found.tokens.add(token)
            group_of[token] = found
        return found

    for key, piece in producer.pieces:
        tokens: list[_Token] = [] if piece.data_epoch is None else [("data", piece.data_epoch)]
        tokens += [] if piece.marker_epoch is None else [("marker", piece.marker_epoch)]
        group_with(tokens).pieces.append((key, piece))
    for key, state in producer.states:
        if state.decision != "none":
            group_with([("marker", state.producer_epoch)]).decisions.append((key, state))
    return list({id(group): group for group in group_of.values()}.values())


def _joined(
    producer_id: int,
    producer: _OfProducer,
    group: _Group,
    may_have_lost_markers: Mapping[PartitionKey, bool],
    complete_before_ms: int | None,
) -> Joined:
    by_partition: dict[PartitionKey, list[Piece]] = {}
    for key, piece in group.pieces:
        by_partition.setdefault(key, []).append(piece)
    decided = _decided(producer, group)
    certain = [_part(key, of_partition) for key, of_partition in sorted(by_partition.items())] + decided
    uncertain: list[Part] = []
    problem: Problem = ""
    for key in sorted(_to_find(group, complete_before_ms) - by_partition.keys()):
        # A later epoch in the log shows that the marker was written: the coordinator waits for it.
        if key not in may_have_lost_markers or producer.latest_epochs.get(key, -1) > max(group.epochs("marker")):
            continue
        # With --complete-before, a marker that the log lacks is known to be not yet written.
        if complete_before_ms is None and may_have_lost_markers[key]:
            uncertain.append(Part(key, None, None))
            problem = "marker-lost-or-not-written"
        else:
            certain.append(Part(key, None, None))
    if _has_unknown_partitions(group, by_partition, complete_before_ms):
        # An unknown partition may lack the marker.
        unknown = Part(min(by_partition), None, None)
        if complete_before_ms is None and all(part.marker_offset is not None for part in decided):
            uncertain.append(unknown)
            problem = "partitions-unknown"
        else:
            certain.append(unknown)
    name = _name(producer_id, group)
    strict = Transaction(name, (*certain, *uncertain))
    if _is_several(group, by_partition):
        return Joined(strict, None, "not-distinguished")
    return Joined(strict, Transaction(name, tuple(certain)) if uncertain else strict, problem)


def _part(key: PartitionKey, pieces: Sequence[Piece]) -> Part:
    """Return the part of a transaction that consists of `pieces`, which are in one partition. A marker without data
    counts only if no piece has data: a coordinator may write a marker twice."""
    with_data = [piece for piece in pieces if piece.data_epoch is not None]
    if not with_data:
        first = min(piece.first_offset for piece in pieces)
        return Part(key, first, first)
    markers = [piece.marker_offset for piece in with_data]
    decided = [marker for marker in markers if marker is not None]
    first = min(piece.first_offset for piece in with_data)
    return Part(key, first, max(decided) if len(decided) == len(markers) else None)


def _decided(producer: _OfProducer, group: _Group) -> list[Part]:
    """Return the part of the group in `__transaction_state`, in a list that is empty if it has or needs no part."""
    markers = group.epochs("marker")
    if not markers:
        return []  # no partition has a marker: the transaction is ongoing, and its coordinator aborts it
    if group.decisions:
        [home, *_] = [key for key, _ in group.decisions]
        first: dict[int, int] = {}  # the first decision of each transaction, by the time at which it began
        for _, state in group.decisions:
            first.setdefault(state.start_ms, state.record_offset)
        return [Part(home, min(first.values()), max(first.values()))]
    if not producer.states or not group.epochs("data"):
        return []  # the transactional id has expired, or no data of the transaction is left
    has_own_epoch, latest = _has_own_epoch(group), max(markers)
    for key, state in producer.states:
        # If there is a later record of the producer, compaction has removed the decision.
        if state.producer_epoch > latest or (state.producer_epoch == latest and has_own_epoch):
            return [Part(key, state.record_offset, state.record_offset)]
    if max(state.producer_epoch for _, state in producer.states) == latest:
        return []  # version 1: an earlier transaction of the same epoch, whose decision compaction removed
    return [Part(producer.states[0][0], None, None)]


def _to_find(group: _Group, complete_before_ms: int | None) -> set[PartitionKey]:
    """Return the partitions that must have a marker according to the decisions."""
    return {
        key
        for _, state in group.decisions
        if complete_before_ms is None or state.update_ms >= complete_before_ms
        for key in state.partitions
    }


def _is_several(group: _Group, by_partition: Mapping[PartitionKey, Sequence[Piece]]) -> bool:
    """Return whether the group may have several transactions: it has several decisions, or several pieces in one
    partition. If each transaction has its own epoch, a marker without data is a repetition and does not count."""
    if len({state.start_ms for _, state in group.decisions}) > 1:
        return True
    has_own_epoch = _has_own_epoch(group)
    counts = (sum(piece.data_epoch is not None or not has_own_epoch for piece in of) for of in by_partition.values())
    return any(count > 1 for count in counts)


def _has_own_epoch(group: _Group) -> bool:
    """Return whether the epochs of the group's markers and data differ, as in version 2 of the protocol."""
    epochs = [(piece.data_epoch, piece.marker_epoch) for _, piece in group.pieces if piece.data_epoch is not None]
    return bool(epochs) and all(data != marker for data, marker in epochs)


def _has_unknown_partitions(
    group: _Group, by_partition: Mapping[PartitionKey, Sequence[Piece]], complete_before_ms: int | None
) -> bool:
    """Return whether the group has a decided transaction whose record with the list of partitions is absent, and which
    was not complete before the given time."""
    with_data = [piece for _, piece in group.pieces if piece.data_epoch is not None and piece.marker_offset is not None]
    if not with_data:
        return False
    known = len({state.start_ms for _, state in group.decisions if state.partitions})
    most = max(sum(piece.data_epoch is not None for piece in pieces) for pieces in by_partition.values())
    if known >= most:
        return False
    return complete_before_ms is None or max(piece.marker_ms for piece in with_data) >= complete_before_ms


def _name(producer_id: int, group: _Group) -> str:
    epochs = sorted(group.epochs("data") or group.epochs("marker"))
    return f"producer {producer_id}, epoch {', '.join(map(str, epochs))}"
