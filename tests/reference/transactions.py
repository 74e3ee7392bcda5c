"""Aborted transactions and unneeded markers, one batch at a time: the dull twin of `keytail.clean.transactions`.

`track` follows Kafka's CleanedTransactionMetadata, `broker_entries` what a broker's recovery writes into its
transaction indexes; shares no code with keytail.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tests.reference.cleaner import Aborted

Kind = Literal["plain", "data", "ABORT", "COMMIT", "other control", "emptied control"]


@dataclass(frozen=True)
class Event:
    """One batch, as far as transactions go."""

    kind: Kind
    producer_id: int
    base_offset: int
    last_offset: int

    @property
    def is_control(self) -> bool:
        return self.kind not in ("plain", "data")


def track(events: Iterable[Event], entries: Sequence[Aborted]) -> tuple[list[bool], list[Aborted]]:
    """For each batch, whether it may be discarded; and the entries that stay, in the order of their markers."""
    committed: set[int] = set()
    aborted: dict[int, Aborted] = {}
    seen: set[int] = set()
    waiting = sorted(entries, key=lambda entry: entry.first_offset)
    discards, kept = [], []
    for event in events:
        while waiting and waiting[0].first_offset <= event.last_offset:
            entry = waiting.pop(0)
            aborted.setdefault(entry.producer_id, entry)
        pid = event.producer_id
        discard = False
        if event.kind == "data":
            discard = pid in aborted
            (seen if discard else committed).add(pid)
        elif event.kind == "emptied control":
            discard = True
        elif event.kind == "ABORT":
            discard = pid not in aborted or pid not in seen
            if not discard:
                kept.append(aborted[pid])
            aborted.pop(pid, None)
            seen.discard(pid)
        elif event.kind == "COMMIT":
            discard = pid not in committed
            committed.discard(pid)
        discards.append(discard)
    return discards, kept


def broker_entries(events: Iterable[Event]) -> list[Aborted]:
    """The entries of the whole log, by marker."""
    first_offsets: dict[int, int] = {}
    found = []
    for event in events:
        if event.kind == "data":
            first_offsets.setdefault(event.producer_id, event.base_offset)
        elif event.kind in ("ABORT", "COMMIT") and event.producer_id in first_offsets:
            first = first_offsets.pop(event.producer_id)
            if event.kind == "ABORT":
                stable = min([*first_offsets.values(), event.base_offset + 1])
                found.append(Aborted(event.producer_id, first, event.base_offset, stable))
    return found
