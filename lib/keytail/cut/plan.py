"""Decides the cut of a cluster from its examined partitions, with pure functions (CUT.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keytail.cut.fixed_point import Commit, PartitionKey, Solution, highest_cut
from keytail.cut.partition import Examined
from keytail.cut.transactions import Joined, join
from keytail.errors import Refused

_COMPLETE_BEFORE = (
    "Nothing was written. Give --complete-before with a time some minutes before the first snapshot was taken"
)


@dataclass(frozen=True)
class Plan:
    """The cut of a cluster. `solution` has the offset and the reason for each partition; `transactions_cut` has the
    number of transactions above the cut in each partition that has any.

    `before` and `after` have the latest committed offsets before and after the cut, by partition and group; None for a
    deleted offset.
    """

    solution: Solution
    transactions_cut: Mapping[PartitionKey, int]
    before: Mapping[PartitionKey, Mapping[str, int | None]]
    after: Mapping[PartitionKey, Mapping[str, int | None]]


def decide(partitions: Sequence[Examined], complete_before_ms: int | None = None) -> Plan:
    """Return the plan. Raises Refused if the cut depends on facts that the logs do not show."""
    limits = {one.hosted.key: one.limit for one in partitions}
    commits = {one.hosted.key: one.commits for one in partitions if one.commits}
    blocks = {one.hosted.key: one.blocks for one in partitions}
    joined = join(
        {one.hosted.key: one.pieces for one in partitions if one.pieces},
        {one.hosted.key: one.states for one in partitions if one.states},
        {one.hosted.key: one.may_have_lost_markers for one in partitions},
        complete_before_ms,
    )
    solution = highest_cut(limits, [one.transaction for one in joined], commits, blocks)
    if any(one.problem for one in joined):
        lenient = highest_cut(limits, [one.lenient for one in joined if one.lenient is not None], commits, blocks)
        if lenient.cuts != solution.cuts:
            raise _uncertain(joined, solution, lenient)
    of_removed = (joined[number].transaction.parts for number in solution.removed)
    cut = Counter(part.partition for parts in of_removed for part in parts if part.first_offset is not None)
    return Plan(solution, dict(cut), _latest(commits), _latest(commits, solution.cuts))


def _uncertain(joined: Sequence[Joined], solution: Solution, lenient: Solution) -> Refused:
    """Return the error for the first uncertain transaction that lowers a cut."""
    found = [joined[number] for number in sorted(solution.removed) if joined[number].problem]
    lowered = sorted(key for key, cut in solution.cuts.items() if cut < lenient.cuts[key])
    names = {solution.reasons[key].subject for key in lowered}
    first = next((one for one in found if one.transaction.name in names), found[0])
    (topic, partition), cut, other = lowered[0], solution.cuts[lowered[0]], lenient.cuts[lowered[0]]
    name = first.transaction.name
    effect = f"{topic}-{partition} would be cut at offset {cut} instead of {other}"
    if first.problem == "not-distinguished":
        return Refused(
            f"{name}: all transactions have the same epoch, so they cannot be distinguished, and the whole history of "
            f"the producer would be left out: {effect}",
            remedy="Nothing was written. Take the snapshots while this producer runs no transactions, or let brokers "
            "and clients use version 2 of the transaction protocol (transaction.version=2, clients from 4.0 on)",
            slug="transactions-not-distinguished",
        )
    if first.problem == "marker-lost-or-not-written":
        return Refused(
            f"{name}: a partition of the transaction has no marker of it: compaction or retention removed the marker, "
            f"or it was not written yet when the partition was copied: {effect}",
            remedy=_COMPLETE_BEFORE,
            slug="marker-lost-or-not-written",
        )
    return Refused(
        f"{name}: __transaction_state does not contain the decision of the transaction (any more, or not yet), so its "
        f"partitions are not known, and one of them may lack the marker: {effect}",
        remedy=_COMPLETE_BEFORE,
        slug="transaction-partitions-unknown",
    )


def _latest(
    commits: Mapping[PartitionKey, Sequence[Commit]], cuts: Mapping[PartitionKey, int] | None = None
) -> dict[PartitionKey, dict[str, int | None]]:
    """Return the latest committed offsets, by the partition for which they were committed and by group; None for a
    deleted offset. If `cuts` are given, only commits below the cut of their partition are used."""
    found: dict[PartitionKey, dict[str, int | None]] = {}
    for home, of_home in commits.items():
        for commit in of_home:
            if cuts is None or commit.record_offset < cuts[home]:
                offset = commit.committed_offset if commit.committed_offset >= 0 else None
                found.setdefault(commit.partition, {})[commit.group] = offset
    return found
