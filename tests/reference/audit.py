"""Compares replicas with dictionaries, one record at a time: the reference model of `keytail audit`.

Shares no code with keytail. audit/AUDIT.md defines differences and their explanations.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.reference.batches import Batch, Rec

ABORT, COMMIT = 0, 1


@dataclass(frozen=True)
class HeldRecord:
    """A record with its batch."""

    rec: Rec
    batch: Batch

    @property
    def control(self) -> int | None:
        return struct.unpack_from(">h", self.rec.key or b"", 2)[0] if self.batch.control else None

    @property
    def key(self) -> Any:
        return ("none", self.rec.offset) if self.rec.key is None else self.rec.key

    @property
    def is_plain(self) -> bool:
        return not self.batch.control and self.rec.key is not None

    def parts(self) -> dict[str, Any]:
        batch, sequence = self.batch, -1
        if batch.base_sequence >= 0:
            sequence = (batch.base_sequence + self.rec.offset - batch.base_offset) % 2**31
        return {
            "value": self.rec.value,
            "headers": self.rec.headers,
            "timestamp": self.rec.timestamp,
            "leader-epoch": batch.leader_epoch,
            "producer-id": batch.producer_id,
            "producer-epoch": batch.producer_epoch,
            "sequence": sequence,
            "transactional": batch.transactional,
        }


@dataclass
class Found:
    common: int = 0
    divergences: Counter[str] = field(default_factory=Counter)
    explained: Counter[str] = field(default_factory=Counter)
    early: Counter[str] = field(default_factory=Counter)


def limits(
    logs: Sequence[Sequence[tuple[int, Sequence[Batch]]]], starts: Sequence[int], checkpoints: Sequence[int | None]
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return, for each replica, the known and the possible cleaning: the offset below which it removed records, and the
    offset of the last record that superseded them.

    `logs` has the base offset and the batches of each segment of each replica.
    """
    shown = [max((_shown(*segment) for segment in log), default=0) for log in logs]
    highest = max(s if c is None else c for s, c in zip(shown, checkpoints, strict=True))
    found = []
    everywhere = {
        (r.offset, r.key)
        for log, start in zip(logs, starts, strict=True)
        for _, batches in log for b in batches for r in b.records
        if r.offset >= start and r.key is not None and not b.control and not b.transactional
    }  # fmt: skip
    ends = []
    for log, start, own, checkpoint in zip(logs, starts, shown, checkpoints, strict=True):
        if checkpoint is not None:
            ends.append(checkpoint)
            continue
        records = [(r, b) for _, batches in log for b in batches if not b.control for r in b.records]
        records = [(r, b) for r, b in records if r.offset >= start]
        first = [r.offset for r, _ in records if r.key is None]
        oldest: dict[bytes | None, int] = {}
        for r, b in records:
            if not b.transactional:
                oldest.setdefault(r.key, r.offset)
        first += [offset for offset, key in everywhere if offset > oldest.get(key, offset)]
        ends.append(max(own, highest, min(first, default=2**63 - 1)))
    for own, checkpoint, end in zip(shown, checkpoints, ends, strict=True):
        fetched = min(own, highest)
        if checkpoint is None:
            found.append(((own, end - 1), (end, end - 1)))
        elif fetched <= checkpoint:
            found.append(((checkpoint, checkpoint - 1), (max(ends), max(ends) - 1)))
        else:
            found.append(((fetched, max(ends) - 1), (max(ends), max(ends) - 1)))
    return found


def _shown(base: int, batches: Sequence[Batch]) -> int:
    """Return the offset up to which the segment itself shows that it was cleaned."""
    shown, expected = 0, base
    for batch in batches:
        if batch.base_offset > expected:
            shown = batch.base_offset
        expected = batch.last_offset + 1
        offsets = set(range(batch.base_offset, expected))
        if offsets != {r.offset for r in batch.records} or getattr(batch, "delete_horizon_ms", None) is not None:
            shown = expected
    return shown


def audit(
    logs: Sequence[Sequence[Batch]], starts: Sequence[int], end: int, cleaned: Sequence[Sequence[tuple[int, int]]]
) -> Found:
    """Compare undamaged replicas whose logs begin at `starts`; `cleaned` has their limits."""
    held = [
        {r.offset: HeldRecord(r, b) for b in log for r in b.records if r.offset >= start}
        for log, start in zip(logs, starts, strict=True)
    ]
    actions = _marker_results(held)
    found = Found()
    offsets = sorted({offset for item in held for offset in item if offset < end})
    for offset in offsets:
        here = [item[offset] for item in held if offset in item]
        others = [h for h in here if h.key != here[0].key or h.control != here[0].control]
        if others:
            first, other = here[0], others[0]
            kind = "key"
            if (first.control is None) != (other.control is None):
                kind = "control"
            elif first.control is not None and first.control != other.control:
                kind = "control-type"
            found.divergences[kind] += 1
        for key in {(h.key, h.control is None) for h in here}:
            same = [h for h in here if (h.key, h.control is None) == key]
            found.common += len(same) > 1
            for other in same[1:]:
                a, b = same[0].parts(), other.parts()
                timeless = any(
                    getattr(h.batch, "magic", 2) < 2 and h.rec.timestamp == -1 for h in (same[0], other)
                )
                found.divergences.update(
                    name for name in a if a[name] != b[name] and not (name == "timestamp" and timeless)
                )
            lacking = [
                number
                for number, item in enumerate(held)
                if starts[number] <= offset
                and not (offset in item and (item[offset].key, item[offset].control is None) == key)
            ]
            if lacking:
                _explain(same[0], lacking, held, actions, end, cleaned, found, bool(others))
    _transactions(held, starts, end, found)
    for counter in (found.divergences, found.explained, found.early):
        for name in [name for name, count in counter.items() if count == 0]:
            del counter[name]
    return found


def _markers(held: Sequence[dict[int, HeldRecord]]) -> dict[int, dict[int, set[int]]]:
    """Return, by producer and offset, the kinds of markers at the offset."""
    markers: dict[int, dict[int, set[int]]] = {}
    for item in held:
        for offset, h in item.items():
            if h.control in (ABORT, COMMIT):
                markers.setdefault(h.batch.producer_id, {}).setdefault(offset, set()).add(h.control)
    return markers


def _marker_results(held: Sequence[dict[int, HeldRecord]]) -> Any:
    markers = _markers(held)

    def fate(h: HeldRecord) -> int | None:
        if not h.batch.transactional:
            return COMMIT
        later = [at for at in markers.get(h.batch.producer_id, {}) if at >= h.rec.offset]
        return None if not later else min(markers[h.batch.producer_id][min(later)])

    return fate


def _explain(h, lacking, held, actions, end, cleaned, found, is_other) -> None:
    offset = h.rec.offset
    if h.control is not None:
        found.explained["marker"] += 1
        return
    order = ["superseded", "deleted", "aborted", "keyless", "cleaning-unknown", "lost"]
    worst, early = 0, False
    of_key = [
        [x for x in item.values() if x.is_plain and x.rec.key == h.rec.key and actions(x) == COMMIT] for item in held
    ]
    tombs = [x.rec.offset for item in of_key for x in item if x.rec.value is None and offset <= x.rec.offset < end]
    for number in lacking:
        own = [x.rec.offset for x in of_key[number]]
        reasons = []
        for limit, last in cleaned[number]:
            reason = "lost"
            if offset >= limit:
                pass
            elif h.batch.transactional and actions(h) == ABORT:
                reason = "aborted"
            elif h.rec.key is None:
                reason = "keyless"
            elif any(offset < x <= last for x in own):
                reason = "superseded"
            elif any(x > offset for x in own) and (last >= end or any(x <= last for x in tombs)):
                reason = "superseded"
            elif not own and any(x <= last for x in tombs):
                reason = "deleted"
            elif any(offset < x.rec.offset <= last for item in of_key for x in item):
                reason = "superseded" if not own or max(own) > offset else "lost"
            reasons.append(reason)
        known, possible = reasons
        if known == "deleted":
            older = [x.rec.offset for item in of_key for x in item if x.rec.offset < offset]
            early = early or (h.rec.value is None and bool(older))
        reason = known if known != "lost" or possible == "lost" else "cleaning-unknown"
        worst = max(worst, order.index(reason))
    if order[worst] == "lost":
        found.divergences["lost"] += not is_other
    else:
        found.explained[order[worst]] += 1
    found.early["tombstone"] += early


def _transactions(held, starts, end, found) -> None:
    for producer, markers in _markers(held).items():
        before = -1
        for offset in sorted(markers):
            data = [
                any(
                    h.batch.transactional and not h.batch.control and h.batch.producer_id == producer
                    and before < h.batch.base_offset < offset and h.batch.base_offset >= start
                    for h in item.values()
                )
                for item, start in zip(held, starts, strict=True)
            ]  # fmt: skip
            before = offset
            if offset >= end:
                continue
            has = [
                offset in item
                and item[offset].control in (ABORT, COMMIT)
                and item[offset].batch.producer_id == producer
                for item in held
            ]
            expected = [start <= offset for start in starts]
            found.divergences["decided-otherwise"] += len(markers[offset]) > 1 and any(data)
            lost = [e and d and not m for e, d, m in zip(expected, data, has, strict=True)]
            early = [e and not d and not m for e, d, m in zip(expected, data, has, strict=True)]
            found.divergences["marker-lost"] += any(lost)
            found.early["marker"] += any(early) and any(data)
