"""Aborted transactions and unneeded markers, one batch at a time: the reference model of `keytail.log.transactions`.

`track` follows Kafka's CleanedTransactionMetadata. `broker_entries` returns the entries that a broker's recovery writes
into its transaction indexes, and `right_entries` the correct values of existing entries. Shares no code with keytail.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tests.reference.cleaner import Aborted

Kind = Literal["plain", "data", "ABORT", "COMMIT", "other control", "emptied control"]


@dataclass(frozen=True)
class Event:
    """A batch, reduced to what matters for transactions."""

    kind: Kind
    producer_id: int
    base_offset: int
    last_offset: int

    @property
    def is_control(self) -> bool:
        return self.kind not in ("plain", "data")


def track(events: Iterable[Event], entries: Sequence[Aborted]) -> tuple[list[bool], list[Aborted]]:
    """Return, for each batch, whether it may be discarded, and the retained entries in the order of their markers."""
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
    """Return the entries of the whole log, by marker."""
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


def _ends(events: Sequence[Event]) -> list[tuple[int, int, Event]]:
    """Return (number, number of the producer's previous marker or -1, event) for each marker.

    After the log, a plain batch of each producer is added.
    """
    numbered = list(enumerate(events))
    found: list[tuple[int, int, Event]] = []
    for pid in {event.producer_id for event in events}:
        before = -1
        for number, event in numbered:
            if event.producer_id == pid and event.kind in ("ABORT", "COMMIT"):
                found.append((number, before, event))
                before = number
        found.append((len(events), before, Event("plain", pid, 2**63 - 1, 2**63 - 1)))
    return found


def right_entries(events: Sequence[Event], known: Sequence[Aborted], log_start_offset: int = 0) -> list[Aborted]:
    """Return the entries, by marker, of transactions that have data left, or a plausible entry in `known`."""
    firsts: list[tuple[int, int]] = []  # (first offset, end) of all transactions
    found: list[tuple[Aborted | None, int, int, int]] = []
    for number, before, end in _ends(events):
        data = [
            event.base_offset
            for event in events[before + 1 : number]
            if event.kind == "data" and event.producer_id == end.producer_id and event.last_offset >= log_start_offset
        ]
        first = data[0] if data else None
        if end.kind == "ABORT" and end.base_offset >= log_start_offset:
            behind = events[before].base_offset if before >= 0 else -1
            old = None
            for entry in sorted(known, key=lambda entry: entry.first_offset):
                is_same = (entry.producer_id, entry.last_offset) == (end.producer_id, end.base_offset)
                limit = end.base_offset - 1 if first is None else first
                if is_same and behind < entry.first_offset <= limit and _can_begin(events, entry):
                    old = old or entry
            if old is not None:
                first = old.first_offset
            if first is not None:
                found.append((old, end.producer_id, first, end.base_offset))
        if first is not None:
            firsts.append((first, end.base_offset))
    out = []
    for old, pid, first, last in sorted(found, key=lambda item: item[3]):
        stable = min([last + 1, *(begin for begin, end_ in firsts if end_ > last)])
        if old is not None and 0 <= old.last_stable_offset < stable:
            is_free = all(not e.base_offset <= old.last_stable_offset <= e.last_offset for e in events)
            if is_free or old.last_stable_offset < log_start_offset:
                stable = old.last_stable_offset
        out.append(Aborted(pid, first, last, stable))
    return out


def _can_begin(events: Sequence[Event], entry: Aborted) -> bool:
    """Return whether the entry's first offset is the base offset of data of its producer, or no batch contains it."""
    there = [event for event in events if event.base_offset <= entry.first_offset <= event.last_offset]
    own = [e for e in there if e.kind == "data" and e.producer_id == entry.producer_id]
    return not there or [e.base_offset for e in own] == [entry.first_offset]
