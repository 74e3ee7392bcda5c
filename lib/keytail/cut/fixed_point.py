"""Finds the highest consistent cut of a cluster's partitions: one offset per partition, below which everything is kept.

The functions are pure. CUT.md, "Constraints", defines which cuts are consistent, and why there is exactly one highest
cut: every step below lowers a cut only as far as every consistent cut at or below the present one requires.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

PartitionKey: TypeAlias = tuple[str, int]

ReasonKind = Literal["whole", "replicas", "transaction", "committed-offset"]


@dataclass(frozen=True)
class Part:
    """The part of a transaction in one partition. `first_offset` is the first offset of its data or, without data, of
    its marker; None if the log has neither. `marker_offset` is None if the log has no marker that decides it.

    The decision in `__transaction_state` is also a part: its offsets are those of the first and the last of the records
    with a decision, which is usually one record.
    """

    partition: PartitionKey
    first_offset: int | None
    marker_offset: int | None


@dataclass(frozen=True)
class Transaction:
    """All parts of a transaction, or of several transactions that cannot be distinguished. `name` is for reports."""

    name: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """An offset that a group committed. `record_offset` is the offset of the record in the group's partition of
    `__consumer_offsets`; a later record with the same `group` and `partition` replaces this commit."""

    record_offset: int
    group: str
    partition: PartitionKey
    committed_offset: int


@dataclass(frozen=True)
class Blocks:
    """Ranges of offsets that a cut must not divide: from `starts` to below `ends`, int64[n], ascending and disjoint."""

    starts: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    ends: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    @classmethod
    def union(cls, ranges: Iterable[tuple[np.ndarray, np.ndarray]]) -> Blocks:
        """Return the union of ranges, given as pairs of arrays (starts, ends); overlapping ranges become one range."""
        pairs = list(ranges)
        if not pairs:
            return cls()
        starts, ends = (np.concatenate([pair[n] for pair in pairs]).astype(np.int64) for n in (0, 1))
        order = np.argsort(starts, kind="stable")
        starts, reach = starts[order], np.maximum.accumulate(ends[order])
        begins = np.ones(len(starts), bool)
        begins[1:] = starts[1:] >= reach[:-1]
        last = np.append(np.flatnonzero(begins)[1:] - 1, len(starts) - 1) if len(starts) else np.empty(0, np.int64)
        return cls(starts[begins], reach[last])

    def floor(self, offset: int) -> int:
        """Return the largest offset at or below `offset` that is not inside a range."""
        at = int(np.searchsorted(self.starts, offset)) - 1
        return int(self.starts[at]) if at >= 0 and offset < self.ends[at] else offset


@dataclass(frozen=True)
class Reason:
    """The constraint that lowered a cut last. `subject` is the name of the transaction or group, or empty."""

    kind: ReasonKind
    subject: str = ""


@dataclass(frozen=True)
class Solution:
    """The cut of each partition, and the reason for each cut. `removed` has the indexes of the transactions above the
    cuts in the given sequence."""

    cuts: Mapping[PartitionKey, int]
    reasons: Mapping[PartitionKey, Reason]
    removed: frozenset[int]


def highest_cut(
    limits: Mapping[PartitionKey, int],
    transactions: Sequence[Transaction] = (),
    commits: Mapping[PartitionKey, Sequence[Commit]] | None = None,
    blocks: Mapping[PartitionKey, Blocks] | None = None,
) -> Solution:
    """Return the highest consistent cut at or below `limits`, the offsets that the replicas of each partition have in
    common.

    `commits` are the commits in each partition of `__consumer_offsets`, ascending by record offset. Parts and commits
    that refer to a partition without a limit are ignored: no such partition is in the result.
    """
    search = _Search(limits, transactions, commits or {}, blocks or {})
    while search.settle_transactions() or search.settle_commits():
        pass
    return Solution(search.cuts, search.reasons, frozenset(search.removed))


class _Search:
    """The search for the highest consistent cut: its present cuts, which only decrease."""

    def __init__(
        self,
        limits: Mapping[PartitionKey, int],
        transactions: Sequence[Transaction],
        commits: Mapping[PartitionKey, Sequence[Commit]],
        blocks: Mapping[PartitionKey, Blocks],
    ) -> None:
        cuts = dict(limits)
        self.cuts, self._blocks, self._transactions = cuts, blocks, transactions
        self.reasons = dict.fromkeys(cuts, Reason("whole"))
        self.removed: set[int] = set()
        # For each partition: the markers below the present cut (offset, number of the transaction), ascending.
        self._markers: dict[PartitionKey, list[tuple[int, int]]] = {key: [] for key in cuts}
        self._to_remove: list[int] = []
        for number, transaction in enumerate(transactions):
            for part in transaction.parts:
                if part.partition in cuts:
                    if part.marker_offset is None:
                        self._to_remove.append(number)
                    else:
                        self._markers[part.partition].append((part.marker_offset, number))
        for markers in self._markers.values():
            markers.sort()
        # For each group and partition: the commits below the present cut, in the order of their records.
        self._latest: dict[tuple[PartitionKey, str, PartitionKey], list[Commit]] = {}
        for home, of_home in commits.items():
            for commit in of_home if home in cuts else ():
                if commit.partition in cuts:
                    self._latest.setdefault((home, commit.group, commit.partition), []).append(commit)
        for key, limit in limits.items():
            self._lower(key, limit, Reason("replicas"))
            self._pop_markers(key)

    def _lower(self, key: PartitionKey, offset: int, reason: Reason) -> bool:
        offset = self._blocks[key].floor(offset) if key in self._blocks else offset
        if offset >= self.cuts[key]:
            return False
        self.cuts[key], self.reasons[key] = offset, reason
        self._pop_markers(key)
        return True

    def _pop_markers(self, key: PartitionKey) -> None:
        markers = self._markers[key]
        while markers and markers[-1][0] >= self.cuts[key]:
            self._to_remove.append(markers.pop()[1])

    def settle_transactions(self) -> bool:
        """Cut all parts of every transaction that has an undecided part; return whether a cut changed."""
        changed = False
        while self._to_remove:
            number = self._to_remove.pop()
            if number in self.removed:
                continue
            self.removed.add(number)
            transaction = self._transactions[number]
            for part in transaction.parts:
                if part.first_offset is not None and part.partition in self.cuts:
                    reason = Reason("transaction", transaction.name)
                    changed |= self._lower(part.partition, part.first_offset, reason)
        return changed

    def settle_commits(self) -> bool:
        """Lower cuts until the latest remaining offset commit of each group and partition has a committed offset that
        is not above the cut of that partition; return whether a cut changed."""
        changed = False
        for (home, group, partition), commits in self._latest.items():
            while commits and commits[-1].record_offset >= self.cuts[home]:
                commits.pop()
            while commits and commits[-1].committed_offset > self.cuts[partition]:
                changed |= self._lower(home, commits.pop().record_offset, Reason("committed-offset", group))
        return changed
