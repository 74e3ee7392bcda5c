"""Cleans one log in several rounds with Kafka and with another cleaner, usually keytail, with more traffic between the
rounds.

In mode "each", both sides start every round from Kafka's previous result. In "drift" and "measured", each side
continues from its own result. "damaged" is like "each", with wrong transaction indexes on keytail's side. The cases
that the rounds covered are counted; fuzz.py draws logs and shrinks failures.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from keytail.errors import KeytailError
from tests.crash.trees import read_tree, remove_tree, write_tree
from tests.interop.compare import differences
from tests.interop.kafka import Cleaned, Kafka, KafkaError, Loaded, Opened
from tests.reference.batches import Rec
from tests.reference.legacy import decode_any_log

CHOICE = (
    "first_dirty_offset",
    "first_uncleanable_offset",
    "clean_bytes",
    "cleanable_bytes",
    "total_bytes",
    "dirty_ratio",
    "must_compact_now",
    "rewrite_checkpoint",
)

# By parts of the text of Kafka's exceptions, the outcomes that are allowed on the other side: "right" (a correct
# result), the name of keytail's exception or, ValueError, that of the reference model.
NO_ROOM = ("IllegalArgumentException", "Attempt to append to a full")
OLD_EMPTIED = ("IllegalStateException", "Empty batches are only supported for magic v2")
THROWN: dict[tuple[str, str], tuple[str, ...]] = {
    NO_ROOM: ("right", "ValueError"),
    OLD_EMPTIED: ("Refused", "ValueError"),
}


@dataclass(frozen=True)
class Circumstances:
    """The circumstances of one round, for both sides. If `map_max_entries` is None, the map has room for all keys."""

    configs: Mapping[str, Any]
    now_ms: int
    log_start_offset: int
    log_end_offset: int
    high_watermark: int
    checkpoint: int | None
    map_max_entries: int | None
    producer_id_expiration_ms: int


@dataclass(frozen=True)
class Outcome:
    """What the other side selected (by the names of CHOICE), and the end offset of its round, or None if it did not
    run. `rounds` is the number of passes in which the groups were written, each installed before the next.
    """

    choice: Mapping[str, Any]
    end_offset: int | None
    rounds: int = 1


class Side(Protocol):
    """Cleans partition t-0 of a log dir in place. Raises an exception if it refuses to."""

    def __call__(self, log_dir: Path, now: Circumstances) -> Outcome: ...


Mode = Literal["each", "drift", "measured", "damaged"]
Draw = Callable[[Opened, int | None], Circumstances]
# Runs a second round. Returns True if there was still something to clean; a separate copy is then cleaned.
Again = Callable[[Path, Circumstances], bool]

@dataclass
class Round:
    """The steps and settings of one round. `now` is drawn when the round is first run, and used again when it is
    repeated.
    """

    steps: list[dict[str, Any]]
    options: Mapping[str, Any]
    files_seed: int | None
    now: Circumstances | None = None
    own_checkpoint: bool = True


class Difference(AssertionError):
    """The results of Kafka and keytail differ, although the mode requires them to be equal."""


class Case:
    """One random log: `source` is the input of keytail's round, `kafka` and `ours` are the two results.

    With `keeps_magic`, messages of magic 0 and 1 keep their magic.
    """

    keeps_magic = False

    def __init__(
        self, kafka: Kafka, home: Path, seen: Counter[str], mode: Mode = "each", again: Again | None = None
    ) -> None:
        self.harness, self.home, self.seen, self.mode, self.again = kafka, home, seen, mode, again
        self.source, self.kafka, self.ours = home / "source", home / "kafka", home / "ours"
        self.checkpoint: int | None = None
        self.log_start_offset = 0
        self.now: Circumstances | None = None
        self.rounds: list[Round] = []

    def play(self, ours: Side, round_: Round, draw: Draw | None = None) -> bool:
        """Run one round on both sides, and compare the results. Return False if Kafka's cleaner raised an exception, so
        that no further round is possible.
        """
        self.rounds.append(round_)
        drifts = self.mode in ("drift", "measured")
        first = self.kafka if drifts and self.kafka.exists() else self.source
        opened = self._append(first, round_)
        if draw is not None:
            round_.now = draw(opened, self.checkpoint)
            round_.own_checkpoint = round_.now.checkpoint == self.checkpoint
        self.now = now = self._clamped(round_, opened)
        self._write_log_dir_files(first, now, opened)
        if first == self.kafka:
            again = self._append(self.ours, round_)
            if (again.log_start_offset, again.log_end_offset) != (now.log_start_offset, now.log_end_offset):
                raise Difference("the log end offset after the same traffic differs")
            self._write_log_dir_files(self.ours, now, again)
            _copy(self.ours, self.source)
        else:
            _copy(self.source, self.kafka)
            _copy(self.source, self.ours)
        self.log_start_offset = now.log_start_offset
        self.seen["rounds"] += 1
        try:
            theirs = self._kafka_round(now)
        except KafkaError as error:
            self.seen[f"Kafka raised {error.java_class}"] += 1
            self._check_after_exception(ours, now, error)
            return False
        try:
            outcome = ours(self.ours, now)
        except KeytailError as refusal:
            # Kafka makes a deleted value visible again, which the proof forbids (DECISIONS.md 17).
            if not self._forbidden_revival(refusal, now):
                raise
            self.seen["refused: a deleted value would be visible again"] += 1
            return False
        self._compare(theirs, outcome, now)
        self.seen["rounds that wrote groups in several passes"] += outcome.rounds > 1
        self._check_served(now)
        self._count(theirs, now)
        self.checkpoint = theirs.end_offset if theirs.cleaned else self.checkpoint
        if self.again is not None:
            self._again(self.again, replace(now, checkpoint=theirs.end_offset if theirs.cleaned else now.checkpoint))
        if not drifts:
            _copy(self.kafka, self.source)
        return True

    def _forbidden_revival(self, refusal: KeytailError, now: Circumstances) -> bool:
        inside = now.checkpoint is not None and not self._is_base(now.checkpoint)
        return inside and refusal.what.startswith("a tombstone was removed before an older record of its key")

    def _append(self, log_dir: Path, round_: Round) -> Opened:
        options = {**round_.options, "log_start_offset": self.log_start_offset}
        log_dir.mkdir(parents=True, exist_ok=True)
        opened = self.harness.append(log_dir / "t-0", round_.steps, **options)
        self._set_mtimes(log_dir, round_)
        return opened

    def _clamped(self, round_: Round, opened: Opened) -> Circumstances:
        """Return the drawn circumstances, with offsets limited to the log, which may have become shorter by shrinking.
        """
        now = round_.now
        assert now is not None
        start, end = opened.log_start_offset, opened.log_end_offset
        watermark = end if now.high_watermark == now.log_end_offset else min(max(now.high_watermark, start), end)
        checkpoint = self.checkpoint if round_.own_checkpoint else now.checkpoint
        return replace(
            now, log_start_offset=start, log_end_offset=end, high_watermark=watermark, checkpoint=checkpoint
        )

    def _compare(self, theirs: Cleaned, outcome: Outcome, now: Circumstances) -> None:
        self._check_selection(theirs, outcome, now)
        if self.mode not in ("measured", "damaged"):
            interval = int(now.configs["index.interval.bytes"])
            found = differences(self.kafka / "t-0", self.ours / "t-0", index_interval_bytes=interval)
            if found:
                raise Difference("\n".join(found))

    def _check_selection(self, theirs: Cleaned, outcome: Outcome, now: Circumstances) -> None:
        names = CHOICE if self.mode != "measured" else CHOICE[:2]
        other = [
            f"{name}: Kafka's {getattr(theirs, name)}, ours {outcome.choice[name]}"
            for name in names
            if getattr(theirs, name) != outcome.choice[name] and theirs.total_bytes  # 0 of 0 bytes is NaN
        ]
        if other:
            raise Difference(f"the selection differs from that of Kafka: {other}")
        end_offset = theirs.end_offset if theirs.cleaned else None
        if outcome.end_offset != end_offset and not self._map_may_end_elsewhere(theirs, outcome, now):
            raise Difference(f"the end offset differs: Kafka's {end_offset}, keytail's {outcome.end_offset}")

    def _map_may_end_elsewhere(self, theirs: Cleaned, outcome: Outcome, now: Circumstances) -> bool:
        """Return whether a full map may have ended the two rounds at different offsets.

        If a round begins inside a segment, the keys in the map depend on entries of aborted transactions without
        remaining data (CLEANING.md, "Aborted data and the map"), which a damaged index may have lost.
        """
        inside = now.checkpoint is not None and not self._is_base(now.checkpoint)
        if self.mode != "damaged" or not inside or not theirs.cleaned or outcome.end_offset is None:
            return False
        if min(theirs.end_offset, outcome.end_offset) >= outcome.choice["first_uncleanable_offset"]:
            return False
        self.seen["rounds that a full map ended at another offset"] += 1
        return True

    def _again(self, again: Again, now: Circumstances) -> None:
        """Check promise 4: a second run at the same clock changes nothing, unless the map limited the round."""
        before = _contents(self.ours)
        if again(self.ours, now):
            self.seen["rounds that a full map ended early"] += 1
        elif before != _contents(self.ours):
            raise Difference("a second run at the same clock changed something")
        else:
            self.seen["second runs that changed nothing"] += 1

    def _set_mtimes(self, log_dir: Path, round_: Round) -> None:
        """Set file times to the nanosecond; those of indexes differ from that of their log, because only the latter
        matters.

        Files that a round has cleaned are left out, so that each side keeps the times that it has written.
        """
        if round_.files_seed is None and self.mode in ("each", "damaged"):
            return
        clock_ms = int(round_.options["clock_ms"])
        for path in sorted((log_dir / "t-0").iterdir()):
            if path.stem.isdigit() and int(path.stem) >= (self.checkpoint or 0):
                age_ns = random.Random(f"{round_.files_seed}-{path.name}").randrange(3_600_000_000_000)
                os.utime(path, ns=(0, clock_ms * 1_000_000 - age_ns))

    def _write_log_dir_files(self, log_dir: Path, now: Circumstances, opened: Opened) -> None:
        write = self.harness.write_checkpoint
        checkpoints = {} if now.checkpoint is None else {"t-0": now.checkpoint, "other-1": 5}
        starts = {"t-0": now.log_start_offset} if now.log_start_offset > opened.segment_bases[0] else {}
        write(log_dir / "cleaner-offset-checkpoint", checkpoints)
        write(log_dir / "log-start-offset-checkpoint", starts)
        write(log_dir / "replication-offset-checkpoint", {"t-0": now.high_watermark})
        write(log_dir / "recovery-point-offset-checkpoint", {"t-0": now.log_end_offset})
        (log_dir / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":42}')

    def _kafka_round(self, now: Circumstances) -> Cleaned:
        return self.harness.clean(
            self.kafka / "t-0",
            checkpoint=now.checkpoint,
            map_max_entries=now.map_max_entries,
            only_if_cleanable=True,
            **self._opening(now),
        )

    def _opening(self, now: Circumstances) -> dict[str, Any]:
        return {
            "configs": now.configs,
            "clock_ms": now.now_ms,
            "log_start_offset": now.log_start_offset,
            "high_watermark": now.high_watermark,
            "recovery_point": now.log_end_offset,
            "producer_id_expiration_ms": now.producer_id_expiration_ms,
        }

    def _check_served(self, now: Circumstances) -> None:
        """Check that Kafka opens keytail's result without repairs, and reads the same as from its own result."""
        theirs, own = self.loaded(self.kafka, now), self.loaded(self.ours, now)
        if own.repaired or own.fetch_mismatches:
            raise Difference(f"Kafka repaired keytail's result: {own.repaired}, or misread it: {own.fetch_mismatches}")
        names = ["log_start_offset", "log_end_offset", "last_stable_offset"]
        if self.mode == "damaged":
            self._check_committed(theirs, own, now)
        else:
            names += ["committed", "records", "producers", "aborted"] + (["files"] if self.mode != "measured" else [])
        for name in names:
            if getattr(own, name) != getattr(theirs, name):
                raise Difference(f"{name} differ: Kafka's {getattr(theirs, name)}, keytail's {getattr(own, name)}")
        if self.mode != "damaged" and _headers(own) != _headers(theirs):
            raise Difference(f"batches differ: Kafka's {_headers(theirs)}, keytail's {_headers(own)}")
        self._count_batches(theirs)

    def _count_batches(self, theirs: Loaded) -> None:
        headers = [batch for batch in theirs.batches if batch["segment"] != theirs.segment_bases[-1]]
        self.seen["batches"] += len(headers)
        self.seen["batches without records"] += sum(batch["records"] == 0 for batch in headers)
        self.seen["batches with a horizon"] += sum(batch["delete_horizon_ms"] >= 0 for batch in headers)
        self.seen["markers"] += sum(batch["control"] for batch in headers)
        self.seen["aborted transactions"] += len(theirs.aborted)
        self.seen["logs ending in an open transaction"] += any(producer[-1] >= 0 for producer in theirs.producers)
        spans = zip(theirs.segment_bases, theirs.segment_bases[1:], strict=False)
        self.seen["segments that span 2^31 offsets"] += sum(end - base >= 2**31 for base, end in spans)
        self.seen["compressed batches"] += sum(batch["codec"] != "none" for batch in headers)

    def _check_committed(self, theirs: Loaded, own: Loaded, now: Circumstances) -> None:
        """Check that the committed records are the same, except superseded ones after a round that begins inside a
        segment.

        In that case, what Kafka's map omits depends on index entries without remaining data (CLEANING.md 11.4), and the
        log does not show whether such an entry is missing or wrong.
        """
        by_marker = sorted(own.aborted, key=lambda entry: entry[2])
        for number, (_, _, _, stable) in enumerate(by_marker):
            if any(first < stable for _, first, _, _ in by_marker[number + 1 :]):
                raise Difference(f"a search of the transaction indexes stops too early: {by_marker}")
        different = set(theirs.committed) ^ set(own.committed)
        if not different:
            return
        # The records that were committed before the round, and superseded by a record that both sides retained.
        before = set(self.harness.load(self.source / "t-0", transactions=True, **self._opening(now)).committed)
        both = set(theirs.committed) & set(own.committed)
        newest: dict[bytes | None, int] = {}
        for record in theirs.records:
            if record.offset in both:
                newest[record.key] = record.offset
        superseded = {
            record.offset
            for record in (*theirs.records, *own.records)
            if record.key is not None and record.offset in before and record.offset < newest.get(record.key, -1)
        }
        inside = now.checkpoint is not None and not self._is_base(now.checkpoint)
        if not inside or not different <= superseded:
            raise Difference(f"committed records differ: Kafka's {theirs.committed}, keytail's {own.committed}")
        self.seen["rounds that kept other superseded records"] += 1

    def loaded(self, log_dir: Path, now: Circumstances) -> Loaded:
        return self.harness.load(
            log_dir / "t-0", fetch=True, batches=True, transactions=True, **self._opening(now)
        )

    def _check_after_exception(self, ours: Side, now: Circumstances, error: KafkaError) -> None:
        """If Kafka's cleaner raises an exception, check that keytail changes nothing, or that it retains the latest
        record of each key and adds nothing.

        THROWN has the expected result for each kind of exception; any other result is a difference.
        """
        kind = next((kind for kind in THROWN if all(part in str(error) for part in kind)), None)
        if kind is None:
            raise Difference(f"Kafka raised an unknown exception: {error}") from error
        opening = self._opening(now)
        before = self.harness.load(self.source / "t-0", **opening)
        names = sorted(os.listdir(self.source / "t-0"))
        try:
            ours(self.ours, now)
        except (KeytailError, ValueError) as refusal:
            if kind == NO_ROOM and "has magic 0 or 1 and would lose all its records" in str(refusal):
                kind = OLD_EMPTIED  # this is the exception that Kafka would have raised next
            self._expect(kind, type(refusal).__name__, refusal)
            assert names == sorted(os.listdir(self.ours / "t-0"))
            for name in names:
                assert (self.source / "t-0" / name).read_bytes() == (self.ours / "t-0" / name).read_bytes()
            return
        self._expect(kind, "right", None)
        after = self.harness.load(self.ours / "t-0", fetch=True, **opening)
        assert after.repaired == []
        assert after.fetch_mismatches == ()
        assert after.log_end_offset == now.log_end_offset
        # A message of magic 0 has no timestamp; in a v2 batch with append time, it has that of the batch.
        timeless = {record.offset for record in before.records if record.timestamp_ms == -1}
        after_records = [r._replace(timestamp_ms=-1) if r.offset in timeless else r for r in after.records]
        allowed = set(before.records)
        if self.keeps_magic:  # magic 1 in a wrapper of magic 0 is written as magic 0, without the timestamp
            allowed |= {record._replace(timestamp_ms=-1) for record in before.records}
        assert set(after_records) <= allowed
        newest = newest_offsets(self.source / "t-0", now.log_start_offset)
        kept = {record.offset for record in after.records}
        assert newest <= kept, f"the latest records of these keys are missing: {sorted(newest - kept)}"

    def _expect(self, kind: tuple[str, str], outcome: str, refusal: Exception | None) -> None:
        self.seen[f"where Kafka raised {kind[0]}, {kind[1]}: {outcome}"] += 1
        if outcome not in THROWN[kind]:
            raise Difference(f"Kafka raised {kind}: {outcome} ({refusal}), not {THROWN[kind]}")

    def _count(self, theirs: Cleaned, now: Circumstances) -> None:
        self.seen["rounds that cleaned"] += theirs.cleaned
        if not theirs.cleaned:
            return
        full = now.map_max_entries is not None and theirs.map_entries == now.map_max_entries
        self.seen["rounds with a full map"] += full and theirs.end_offset < theirs.first_uncleanable_offset
        self.seen["rounds from inside a segment"] += not self._is_base(theirs.first_dirty_offset)
        self.seen["rounds that merged segments"] += len(self._bases(self.kafka)) < len(self._bases(self.source))
        self.seen["records without a key dropped"] += theirs.records_without_key
        self.seen["records removed"] += theirs.records_read - theirs.records_written

    def _is_base(self, offset: int) -> bool:
        return offset in self._bases(self.source)

    def _bases(self, log_dir: Path) -> set[int]:
        return {int(path.stem) for path in (log_dir / "t-0").glob("*.log")}


def _copy(source: Path, copy: Path) -> None:
    if copy.exists():
        remove_tree(copy)
    write_tree(read_tree(source), copy)  # with modification times, which are part of the input; faster than copytree


def _contents(log_dir: Path) -> dict[str, tuple[bytes, int]]:
    paths = sorted((log_dir / "t-0").iterdir())
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths if path.is_file()}


def _headers(loaded: Loaded) -> list[dict[str, Any]]:
    """Return the headers of all batches, without segments and sizes, which may differ with the compression."""
    return [{k: v for k, v in batch.items() if k not in ("segment", "bytes")} for batch in loaded.batches]


def newest_offsets(partition: Path, log_start_offset: int) -> set[int]:
    """Return the offsets of the latest record of each key that is neither a tombstone nor aborted according to the
    markers.
    """
    newest: dict[bytes, tuple[int, bytes | None]] = {}
    open_data: dict[int, list[Rec]] = {}
    for path in sorted(partition.glob("*.log")):
        for batch in decode_any_log(path.read_bytes()):
            if batch.control:
                settled = open_data.pop(batch.producer_id, [])
                is_commit = bool(batch.records) and batch.records[0].key[2:4] == b"\0\1"
                taken = settled if is_commit else []
            elif batch.transactional:
                open_data.setdefault(batch.producer_id, []).extend(batch.records)
                taken = []
            else:
                taken = list(batch.records)
            for rec in taken:
                if rec.key is not None and rec.offset >= newest.get(rec.key, (-1, None))[0]:
                    newest[rec.key] = (rec.offset, rec.value)
    return {offset for offset, value in newest.values() if value is not None and offset >= log_start_offset}


def doubled_offsets(partition: Path, end_offset: int) -> set[int]:
    """Return the offsets below `end_offset` of records of keys with both a value and a tombstone there."""
    offsets: dict[bytes, set[int]] = {}
    values: dict[bytes, set[bool]] = {}
    for path in sorted(partition.glob("*.log")):
        for batch in decode_any_log(path.read_bytes()):
            for rec in batch.records:
                if rec.key is not None and not batch.control and rec.offset < end_offset:
                    offsets.setdefault(rec.key, set()).add(rec.offset)
                    values.setdefault(rec.key, set()).add(rec.value is None)
    return {offset for key, of_key in offsets.items() if len(values[key]) == 2 for offset in of_key}
