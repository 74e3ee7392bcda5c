"""Implements the second stage of an audit: compares one shard of keys of all replicas, and explains missing records.

A record's key determines its shard, so the shard also has the records that supersede or delete the record. A shard also
has the transactions of some of the producers, and the places (audit/scan.py) of some of the offsets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keytail.audit.cells import unpack_entries, unpack_places
from keytail.audit.compare import DIFFERENCES, REASONS, cleaning_limits
from keytail.audit.compare import PLACES as PLACE_KINDS
from keytail.audit.scan import EVENTS, GAPS, PLACES, AuditTask, FromAllShards, Gap, order_kind, order_replica
from keytail.errors import KeytailError
from keytail.format.control import ControlType
from keytail.kernels.audit import differences, entries, reasons
from keytail.log.fs import FileSystem
from keytail.values import from_bytes

MAX_LOST = 1 << 16  # maximum number of lost records, and of offsets with different records, that a shard reports
_TRANSACTION_KINDS = ("decided-otherwise", "marker-lost", "marker-early")
_NO_MARKERS = np.empty((0, 3), np.int64)


@dataclass
class ShardFindings:
    """The findings of one shard. `lost`: offset, mask of the replicas that lack the record, and the record's entry.
    `elsewhere`: examples of offsets at which replicas have different records. `in_span`: for each of the spans of
    AuditTask, whether replicas have a common record in the span. `records`, `shown` and `first_removable` are by
    replica, `shown` and `first_removable` as in `cleaning_limits`; `first_removable` follows from the records of this
    shard.

    `needs_all_shards`: missing records can be explained only with the facts of all shards (`FromAllShards`).
    """

    records: list[int]
    shown: list[int]
    first_removable: list[int] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    common: int = 0
    divergences: Counter[str] = field(default_factory=Counter)
    explained: Counter[str] = field(default_factory=Counter)
    early: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)
    lost: list[tuple[int, int, list[int]]] = field(default_factory=list)
    elsewhere: list[dict[str, Any]] = field(default_factory=list)
    transactions: Counter[str] = field(default_factory=Counter)
    transaction_examples: list[dict[str, Any]] = field(default_factory=list)
    markers: np.ndarray = field(default_factory=lambda: _NO_MARKERS)
    needs_all_shards: bool = False
    in_span: tuple[bool, ...] = ()


class Examples:
    """Keeps the first `task.examples` findings of each kind, by offset."""

    def __init__(self, task: AuditTask) -> None:
        self._most = task.examples
        self._of_kind: dict[str, list[tuple[int, dict[str, Any]]]] = {}

    def note(self, kind: str, offset: int, details: Mapping[str, Any]) -> None:
        self.add([{"kind": kind, "offset": offset, **details}])

    def add(self, found: Iterable[dict[str, Any]]) -> None:
        for entry in found:
            of_kind = self._of_kind.setdefault(entry["kind"], [])
            of_kind.append((entry["offset"], entry))
            if len(of_kind) > self._most:
                of_kind.sort(key=lambda item: item[0])
                del of_kind[self._most :]

    def found(self) -> list[dict[str, Any]]:
        return [entry for _, entry in sorted((item for of_kind in self._of_kind.values() for item in of_kind),
                                         key=lambda item: (item[0], item[1]["kind"]))]  # fmt: skip


def compare(
    fs: FileSystem, task: AuditTask, shard: int, cells: Iterable[tuple[int, Any]], attempt: str
) -> ShardFindings:
    """Return the findings of one shard. `cells` are in this order: gaps, events, places, entries; places and entries
    are those of each replica by offset."""
    replicas = len(task.replicas)
    found = ShardFindings([0] * replicas, [0] * replicas)
    events: list[np.ndarray] = []
    places, records_ = _Parts(replicas, entries.PLACE_WORDS), _Parts(replicas, entries.WORDS)
    for order, data in cells:
        kind = order_kind(order)
        if kind == GAPS:
            replica, records, cleaned_to, gaps = from_bytes(data)
            found.records[replica] += records
            found.shown[replica] = max(found.shown[replica], cleaned_to)
            found.gaps += gaps
        elif kind == EVENTS:
            events.append(np.frombuffer(bytes(data), np.int64).reshape(-1, reasons.EVENT_COLUMNS))
        elif kind == PLACES:
            places.add(order_replica(order), unpack_places(bytes(data)))
        else:
            records_.add(order_replica(order), unpack_entries(bytes(data)))
    item = _Shard(task, found, records_)
    others, found.elsewhere = _compare_places(task, places)
    item.merge()
    item.find_removable()
    item.explain()
    found.divergences += others
    found.transactions, found.transaction_examples, found.markers = _settle(task, item.gaps, events)
    return found


class _Parts:
    """Collects cells of rows, replica by replica, to join them into one array."""

    def __init__(self, replicas: int, words: int) -> None:
        self._parts = [np.empty((0, words), np.int64)]
        self._sizes = np.zeros(replicas, np.int64)

    def add(self, replica: int, rows: np.ndarray) -> None:
        self._parts.append(rows)
        self._sizes[replica] += len(rows)

    def joined(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return all rows, and the begin and end of each replica's rows; releases the parts."""
        rows = np.concatenate(self._parts)
        self._parts = []
        end = np.cumsum(self._sizes)
        return rows, end - self._sizes, end


def _compare_places(task: AuditTask, parts: _Parts) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Count this shard's offsets with different records, by kind; return the counts and up to MAX_LOST of the
    offsets."""
    places, begin, end = parts.joined()
    counts = np.zeros(differences.PLACE_KINDS, np.int64)
    differing = np.empty((MAX_LOST, 3), np.int64)
    used = differences.merge_places(places, begin.copy(), end, task.end_offset, counts, differing)
    if used < 0:
        raise KeytailError(
            "the records of a replica are not in offset order",
            path=task.replicas[0].path,
            remedy="Run `keytail verify` to find the file; if a broker is running there, run the audit again",
            slug="records-out-of-order",
        )
    found = []
    for kind, *which in differing[:used].tolist():
        names = [task.replicas[int(np.searchsorted(end, at, side="right"))].name for at in which]
        held = {name: _place_of(int(places[at, 1])) for name, at in zip(names, which, strict=True)}
        found.append({"kind": PLACE_KINDS[kind], "offset": int(places[which[0], 0]), "records": held})
    return Counter(dict(zip(PLACE_KINDS, counts.tolist(), strict=True))), found


def _place_of(word: int) -> dict[str, Any]:
    if word & entries.IS_CONTROL:
        return {"control": _control_name(word)}
    return {"key_hash": f"{word >> 16 & (2**48 - 1):012x}"}


def _control_name(what: int) -> str:
    number = (what >> 8 & 0xFF) - 1
    return ControlType(number).name if number in list(ControlType) else str(number)


class _Shard:
    """Compares the records of one shard, and adds to its findings."""

    def __init__(self, task: AuditTask, found: ShardFindings, parts: _Parts) -> None:
        self.task, self.found = task, found
        self.entries, self.begin, self.end = parts.joined()
        self.gaps = np.array([(g.replica, g.first_offset, g.end_offset) for g in found.gaps], np.int64).reshape(-1, 3)
        self.missing_at = self.missing_in = np.empty(0, np.int64)

    def merge(self) -> None:
        n = len(self.entries)
        counts = np.zeros(differences.DIFFERENCES + 1, np.int64)
        examples = np.full((differences.DIFFERENCES, self.task.examples, 2), -1, np.int64)
        missing_at, missing_in = np.empty(n, np.int64), np.empty(n, np.int64)
        spans = np.array(self.task.spans, np.int64).reshape(-1, 2)
        in_span = np.zeros(len(spans), np.uint8)
        missing = differences.merge(
            self.entries, self.begin.copy(), self.end, self.task.log_starts, self.task.end_offset, self.gaps, counts,
            examples, missing_at, missing_in, spans, in_span,
        )  # fmt: skip
        self.found.in_span = tuple(map(bool, in_span))
        self.missing_at, self.missing_in = missing_at[:missing].copy(), missing_in[:missing].copy()
        self.found.common = int(counts[differences.COMMON])
        for number, kind in enumerate(DIFFERENCES):
            self.found.divergences[kind] += int(counts[number])
            for a, b in examples[number][: min(int(counts[number]), self.task.examples)]:
                held = {self._replica_of(at): record_of(self.entries[at].tolist()) for at in (int(a), int(b))}
                offset = int(self.entries[a, entries.OFFSET])
                self.found.examples.append({"kind": kind, "offset": offset, "records": held})

    def _replica_of(self, at: int) -> str:
        return self.task.replicas[int(np.searchsorted(self.end, at, side="right"))].name

    def find_removable(self) -> None:
        """Find, for each replica without a checkpoint, the highest offset to which it can have been cleaned according
        to the keys of this shard."""
        if self.task.from_all is not None:
            return
        for number, replica in enumerate(self.task.replicas):
            offset = 0
            if replica.cleaned_to is None:
                slots = _slots(int(self.end[number] - self.begin[number]))
                offset = reasons.first_removable(self.entries, self.begin, self.end, number, slots)
            self.found.first_removable.append(offset)

    def explain(self) -> None:
        """Find the reason for each missing record, unless this needs the facts of all shards; records without a reason
        are lost."""
        n = len(self.missing_at)
        if n == 0:
            return
        if self.task.from_all is None and self._needs_all_shards():
            self.found.needs_all_shards = True
            return
        from_all = self.task.from_all or FromAllShards(_NO_MARKERS, tuple(self.found.first_removable))
        limits, last = cleaning_limits(self.task.replicas, self.found.shown, from_all.first_removable)
        markers = from_all.markers
        replicas = len(self.task.replicas)
        slots = _slots(n)
        keys = np.empty((n, 2), np.int64)
        used = reasons.index_keys(self.entries, self.missing_at, slots, keys)
        newest, oldest = np.full((used, replicas), -1, np.int64), np.full(used, 2**63 - 1, np.int64)
        later, anywhere, tombstones = (np.full((2, used, replicas), -1, np.int64) for _ in range(3))
        reasons.note_keys(
            self.entries, self.begin, self.end, self.task.end_offset, last, markers, slots, keys, newest, oldest,
            later, anywhere, tombstones,
        )  # fmt: skip
        verdicts, early = np.empty(n, np.int8), np.empty(n, np.uint8)
        reasons.judge(
            self.entries, self.missing_at, self.missing_in, replicas, self.task.end_offset, limits, last, self.gaps,
            markers, slots, keys, newest, oldest, later, anywhere, tombstones, verdicts, early,
        )  # fmt: skip
        for number, reason in enumerate(REASONS):
            count = int(np.count_nonzero(verdicts == number))
            (self.found.divergences if reason == "lost" else self.found.explained)[reason] += count
        self.found.early["tombstone"] += int(np.count_nonzero(early))
        for m in np.flatnonzero(verdicts == reasons.LOST)[:MAX_LOST]:
            words = self.entries[self.missing_at[m]].tolist()
            self.found.lost.append((words[entries.OFFSET], int(self.missing_in[m]), words))


    def _needs_all_shards(self) -> bool:
        """Return whether there are transactions, or a replica without a checkpoint: its first removable record may be
        in another shard."""
        if (self.entries[:, entries.WHAT] & entries.IS_TRANSACTIONAL).any():
            return True
        return self.task.shards > 1 and any(replica.cleaned_to is None for replica in self.task.replicas)


def _slots(n: int) -> np.ndarray:
    """Return an empty hash table for `n` keys."""
    return np.zeros(1 << max(4, (2 * n).bit_length()), np.int64)


def _settle(
    task: AuditTask, gaps: np.ndarray, parts: list[np.ndarray]
) -> tuple[Counter[str], list[dict[str, Any]], np.ndarray]:
    """Return the counts of problems with transactions, examples of them, and the markers of all replicas."""
    counted: Counter[str] = Counter()
    if not parts:
        return counted, [], _NO_MARKERS
    events = np.concatenate(parts)
    keys = (events[:, reasons.E_KIND], events[:, reasons.E_OFFSET], events[:, reasons.E_PRODUCER])
    events = np.ascontiguousarray(events[np.lexsort(keys)])
    counts = np.zeros(reasons.TRANSACTION_KINDS, np.int64)
    found = np.empty((2 * task.examples, reasons.FOUND_COLUMNS), np.int64)
    markers = np.empty((len(events), 3), np.int64)
    n_found, n_markers = reasons.settle(
        events, len(task.replicas), task.log_starts, task.end_offset, gaps, counts, found, markers
    )
    for number, kind in enumerate(_TRANSACTION_KINDS):
        counted[kind] += int(counts[number])
    examples = []
    for row in found[:n_found].tolist():
        kind = _TRANSACTION_KINDS[row[reasons.F_KIND]]
        details: dict[str, Any] = {
            "producer_id": row[reasons.F_PRODUCER],
            "first_data_offset": row[reasons.F_FIRST],
            "aborted_in": _names(task, row[reasons.F_ABORTED]),
            "committed_in": _names(task, row[reasons.F_COMMITTED]),
        }
        if kind == "marker-lost":
            details["lacking"] = _names(task, row[reasons.F_REPLICAS])
        examples.append({"kind": kind, "offset": row[reasons.F_OFFSET], **details})
    return counted, examples, markers[:n_markers].copy()


def _names(task: AuditTask, mask: int) -> list[str]:
    return [replica.name for number, replica in enumerate(task.replicas) if mask >> number & 1]


def record_of(words: list[int]) -> dict[str, Any]:
    """Return the reported fields of a record, from the words of its entry (kernels/audit/entries.py)."""
    what, epochs = words[entries.WHAT], words[entries.EPOCHS]
    sequence = epochs & 0xFFFFFFFF
    producer_epoch = what >> 16 & 0xFFFF
    reported: dict[str, Any] = {
        "key_hash": None if what & entries.KEYLESS else f"{words[entries.LOW] >> 16 & (2**48 - 1):012x}",
        "value_hash": None if what & entries.NULL else f"{words[entries.CONTENT] >> 32 & 0xFFFFFFFF:08x}",
        "headers_hash": f"{words[entries.CONTENT] & 0xFFFFFFFF:08x}",
        "timestamp_ms": words[entries.TIMESTAMP],
        "leader_epoch": epochs >> 32,
        "producer_id": words[entries.PRODUCER],
        "producer_epoch": producer_epoch - 0x10000 if producer_epoch >= 0x8000 else producer_epoch,
        "sequence": -1 if sequence == 0xFFFFFFFF else sequence,
        "transactional": bool(what & entries.IS_TRANSACTIONAL),
    }
    if what & entries.IS_CONTROL:
        reported["control"] = _control_name(what)
    return reported


def of_lost(task: AuditTask, lost: tuple[int, int, list[int]]) -> dict[str, Any]:
    """Return the names of the replicas that lack a record, and the record for each replica that has it, by name."""
    offset, lacking, words = lost
    holding = [r.name for n, r in enumerate(task.replicas) if not lacking >> n & 1 and r.log_start_offset <= offset]
    return {"lacking": _names(task, lacking), "records": dict.fromkeys(holding, record_of(words))}
