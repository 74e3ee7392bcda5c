"""Small log dirs that are compacted as a whole, and checks of the states after a stopped compaction.

A run has the steps of the driver: recover from the last run, survey, select, clean every partition, then install each
and write its checkpoint. The expected result is that of the reference model of the cleaner, applied to what the model
of Kafka's loader finds.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from keytail.compact.cleaner import clean_partition
from keytail.compact.keeper import Keeper
from keytail.compact.plan import Decision, select
from keytail.compact.roll import after_roll, with_roll
from keytail.compact.running.compaction import Compaction
from keytail.compact.running.replacing import InPlace
from keytail.compact.task import CleaningResult, CleaningTask
from keytail.config.compaction import CompactionConfig
from keytail.errors import NO_ERROR, Refused
from keytail.format.producers import ProducerEntry, encode_snapshot
from keytail.log.append.roll_closed import why_not_closed
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.log_dirs import hosted, survey_log_dirs
from keytail.log.missing_segments import refuse_missing_segments
from keytail.log.partition import (
    LogDirFacts,
    PartitionEntry,
    PartitionFacts,
    survey_partition,
)
from keytail.log.producers import first_unstable
from keytail.log.replacement.recover import recover
from keytail.run.engine import ThisProcess
from keytail.run.storage import ScratchSpace
from keytail.run.tasks import Outcome, run_attempt
from keytail.undo.backup import Backup
from tests.crash.driver import Failed
from tests.crash.partitions import NO_PRODUCERS, write_segment
from tests.reference.batches import Batch, Rec, all_records, decode_log, encode_batch, encode_marker
from tests.reference.cleaner import Aborted, Segment, clean
from tests.reference.indexing import index_files
from tests.reference.loader import Loaded, LoadedSegment, load_alike

NOW = 1_750_000_000_000
RETENTION_MS = 1000
INTERVAL_BYTES = 50  # less than a batch, so that every batch except the first has an index entry
CHECKPOINT = "cleaner-offset-checkpoint"
COMMIT_KEY = b"\0\0\0\1"
GONE = ("gone-3", 7)  # checkpoint entry of a partition that is not in the log dir

Files = dict[int, tuple[bytes, bytes, bytes, bytes]]  # by base offset, the log and its three indexes (b"": no entries)
Entries = dict[str, int]


@dataclass(frozen=True)
class Log:
    """A partition in a text notation. A segment is a list of batches, and the last segment is active. A batch consists
    of words:

    `k:v` is a record, `k:-` a tombstone, `!` a delete horizon that has passed, `@7` producer 7, and `+3` a gap before
    the batch. `T7` is data of a transaction of producer 7; `t7` is the same, but the producer has expired at the end;
    `C7` and `A7` are its COMMIT and ABORT markers. A transaction without a marker is open at the end.
    """

    name: str
    batches: Sequence[Sequence[str]]
    checkpoint: int | None = None
    compacted: bool = True

    @cached_property
    def segments(self) -> dict[int, bytes]:
        offset, segments = 0, {}
        for batches in self.batches:
            base, parts = offset, []
            for words in batches:
                data, offset = _batch(words, offset)
                parts.append(data)
            segments[base] = b"".join(parts)
        return segments

    @cached_property
    def end(self) -> int:
        return end_of(self.segments)

    @cached_property
    def records(self) -> dict[int, Rec]:
        return {rec.offset: rec for log in self.segments.values() for rec in all_records(decode_log(log))}

    @cached_property
    def expired(self) -> set[int]:
        """Return the offsets of the tombstones that may be removed."""
        return {
            rec.offset
            for log in self.segments.values()
            for batch in decode_log(log)
            for rec in batch.records
            if rec.value is None and batch.delete_horizon_ms is not None and batch.delete_horizon_ms <= NOW
        }

    @cached_property
    def producers(self) -> dict[int, int]:
        """Return the last data offset of each active producer, by producer id."""
        words = " ".join(words for batches in self.batches for words in batches).split()
        idle = {int(word[1:]) for word in words if word[0] == "t" and ":" not in word}
        batches = [batch for log in self.segments.values() for batch in decode_log(log) if not batch.control]
        found = {batch.producer_id: batch.last_offset for batch in batches if batch.producer_id >= 0}
        return {pid: last for pid, last in found.items() if pid not in idle}

    @cached_property
    def transactions(self) -> Replayed:
        return replay(self.segments)

    @cached_property
    def txn_indexes(self) -> dict[int, tuple[Entry, ...]]:
        """Return the index entries of a broker: the entry of a transaction is in the segment of its marker."""
        bases = sorted(self.segments)
        return {
            base: tuple(entry for entry in self.transactions.aborted if base <= entry.last_offset < end)
            for base, end in zip(bases, [*bases[1:], 2**62], strict=True)
        }

    @cached_property
    def hidden(self) -> set[int]:
        """Return the offsets of records without a visible value: those of aborted or open transactions, and markers."""
        return {
            rec.offset
            for log in self.segments.values()
            for batch in decode_log(log)
            for rec in batch.records
            if batch.control or (batch.transactional and not self.transactions.is_committed(batch))
        }

    def make(self, log_dir: Path) -> None:
        path = log_dir / self.name
        path.mkdir(parents=True)
        for base, log in self.segments.items():
            entries_of = b"".join(entry.encode() for entry in self.txn_indexes[base])
            write_segment(path, base, log, "", entries_of or None)
            if base:
                (path / f"{base:020d}.snapshot").write_bytes(NO_PRODUCERS)
        open_from = self.transactions.open_from
        entries = [
            ProducerEntry(pid, 1, 0, last, 0, NOW, -1, open_from.get(pid, -1)) for pid, last in self.producers.items()
        ]
        (path / f"{self.end:020d}.snapshot").write_bytes(encode_snapshot(entries))
        (path / "leader-epoch-checkpoint").write_text("0\n1\n0 0\n")
        for file in path.iterdir():
            os.utime(file, ns=((NOW - 5000) * 10**6,) * 2)

    def judge(self, records: Sequence[Rec], end: int, bases: Sequence[int]) -> None:
        """Check promises 1 and 2 of lib/keytail/README.md for the records that a broker finds."""
        assert end == self.end, f"{self.name}: the log end offset is {end}, but was {self.end}"
        assert min(bases) == min(self.segments), f"{self.name}: the log begins at {min(bases)}"
        offsets = [rec.offset for rec in records]
        assert offsets == sorted(set(offsets)), f"{self.name}: offsets {offsets}"
        for rec in records:
            assert self.records.get(rec.offset) == rec, f"{self.name}: this record was not in the log: {rec}"
        found = {rec.key: rec for rec in records if rec.offset not in self.hidden}
        values = [rec for rec in self.records.values() if rec.offset not in self.hidden]
        for key, newest in {rec.key: rec for rec in values}.items():
            if key not in found:
                assert newest.offset in self.expired, f"{self.name}: lost {newest}"
            else:
                assert found[key] == newest, f"{self.name}: {found[key]} is visible again, {newest} is missing"

    def check_loaded(self, loaded: Loaded) -> None:
        logs = {base: segment.log for base, segment in loaded.segments.items()}
        self.judge(loaded.records(), end_of(logs), list(logs))
        assert self.end in loaded.snapshots, f"{self.name}: the snapshot of the log end is missing"
        for base, segment in loaded.segments.items():
            indexes = (segment.index, segment.time_index)
            assert indexes == index_files(segment.log, base, INTERVAL_BYTES), f"{self.name}: wrong indexes of {base}"
        self.check_transactions(loaded)

    def check_transactions(self, loaded: Loaded) -> None:
        """Check the first offsets of open transactions, and that the indexes have exactly the aborted ones."""
        found = replay({base: segment.log for base, segment in loaded.segments.items()})
        assert found.open_from == self.transactions.open_from, (
            f"{self.name}: open transactions wrongly begin at {found.open_from}"
        )
        entries = [entry for segment in loaded.segments.values() for entry in parse_entries(segment.txn_index)]
        assert set(entries) <= set(self.transactions.aborted), f"{self.name}: entries {entries}"
        for segment in loaded.segments.values():
            for batch in decode_log(segment.log):
                if batch.transactional and not batch.control:
                    listed = any(entry.covers(batch.producer_id, batch.base_offset) for entry in entries)
                    is_aborted = self.transactions.is_aborted(batch)
                    assert listed == is_aborted, f"{self.name}: {batch} is aborted: {is_aborted}, indexed: {listed}"

    def rolled(self, loaded: Loaded) -> Loaded:
        """Return the log after a roll, if a round can then clean all records of the previous active segment."""
        last = loaded.segments[max(loaded.segments)]
        if not last.log or not self.compacted or self.transactions.open_from:
            return loaded
        return replace(loaded, segments={**loaded.segments, self.end: LoadedSegment(b"", b"", b"", None)})

    def after_a_round(self, loaded: Loaded, first_dirty: int | None, segment_bytes: int) -> tuple[Files, int | None]:
        """Return the files and the checkpoint after one more round on the log that a broker finds."""
        left = files_of(loaded)
        start = min(left) if first_dirty is None else first_dirty
        open_from = min([max(left), *self.transactions.open_from.values()])
        end = max(base for base in left if base <= open_from)
        dirty_from = max((base for base in left if base <= start), default=0)
        if not self.compacted or start >= end or not any(left[b][0] for b in left if dirty_from <= b < end):
            return left, first_dirty
        expected = clean(
            [_source(base, *files) for base, files in sorted(left.items())],
            first_dirty=start,
            first_uncleanable=end,
            now_ms=NOW,
            delete_retention_ms=RETENTION_MS,
            segment_bytes=segment_bytes,
            index_interval_bytes=INTERVAL_BYTES,
            producers={pid: (last, 1) for pid, last in self.producers.items()},
        )
        for output in expected.segments:
            for base in output.source_bases:
                del left[base]
        for out in expected.segments:
            left[out.base_offset] = (out.log, out.index, out.time_index, out.txn_index)
        return left, expected.end_offset


@dataclass(frozen=True)
class LogDir:
    """A log dir. `join` is the number of segments of the first partition that fit into one output. `keep_in` is the
    directory for backups, relative to that of the log dir, and empty without backups; `copies` means that these are not
    links. With `rolls`, active segments are rolled first.
    """

    logs: tuple[Log, ...]
    join: int = 1
    keep_in: str = ""
    copies: bool = False
    rolls: bool = False

    @property
    def segment_bytes(self) -> int:
        if self.join == 1:
            return 1
        return sum(len(log) for log in list(self.logs[0].segments.values())[: self.join])

    def make(self, root: Path) -> None:
        root.mkdir(parents=True)
        for log in self.logs:
            log.make(root)
        given = {log.name: log.checkpoint for log in self.logs if log.checkpoint is not None}
        if given:
            write_checkpoint(root / CHECKPOINT, given | dict([GONE]))
        write_checkpoint(root / "replication-offset-checkpoint", {log.name: log.end for log in self.logs})
        write_checkpoint(root / "recovery-point-offset-checkpoint", {log.name: log.end for log in self.logs})
        (root / "meta.properties").write_text("version=1\n")
        (root / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":1}')

    def run(self, fs: FileSystem, root: Path, run_id: str = "r1") -> Failed:
        """Run the driver's steps without Spark, with all partitions in one bundle, and return the failures."""
        [listing] = survey_log_dirs(fs, [str(root)])
        compacted = {log.name for log in self.logs if log.compacted}
        tasks, reported = [], []
        for entry in listing.partitions:
            if os.path.basename(entry.path) in compacted:
                outcome = run_attempt(partial(self._task, fs, listing, entry), run_id, "")
                if outcome.problem is not None:
                    reported.append(str(outcome.problem))
                elif outcome.value is not None:
                    tasks.append(outcome.value)
        keeper = Keeper(fs, Backup(str(root.parent / self.keep_in), self.copies)) if self.keep_in else None
        destination = InPlace(fs, {str(root): hosted([listing])}, _is_not_run, keeper)
        driver = Compaction(ThisProcess(), tasks, ScratchSpace(fs), destination)
        begun = [driver.installer.rolled(task) for task in tasks]
        outcomes = [
            Outcome(None, problem) if problem else run_attempt(lambda task, _: clean_partition(fs, task), task, "")
            for task, problem in begun
        ]
        answers = [(task, outcome) for (task, _), outcome in zip(begun, outcomes, strict=True)]
        rows = [
            item.row for item in driver.installer.finish(answers)
        ]  # the driver's own code installs, then writes the checkpoint
        reported += [row.error for row in rows if row.status != "compacted"]
        assert not reported or fs is not LOCAL, reported
        return Failed(tuple(reported))

    def _task(self, fs: FileSystem, listing: LogDirFacts, entry: PartitionEntry, run_id: str, _: str) -> Any:
        """Return the task of a partition, or None if there is nothing to clean."""
        recover(fs, entry.path)
        facts = survey_partition(fs, listing, entry)
        if facts.problems:
            raise Refused("; ".join(facts.problems))
        assert facts.leftovers == ()
        unstable = first_unstable(fs, facts, now_ms=NOW)

        def decide_on(facts: PartitionFacts) -> Decision:
            selection = select(facts, self.config, NOW, unstable=unstable, force=True)
            return Decision("would-compact" if selection.eligible else "clean", NO_ERROR, selection)

        decision, roll = decide_on(facts), None
        if self.rolls:
            decision, roll = with_roll(facts, decision, decide_on)
        if decision.status == "clean":
            return None
        refuse_missing_segments(fs, facts)
        if roll is not None and roll.is_due:
            if why := why_not_closed(fs, facts):  # then a run does not roll, and reports this in the row
                raise Refused(f"not rolled: {why}")
            facts = after_roll(facts)
        selection = decision.selection
        assert selection is not None
        return CleaningTask(
            facts.topic, facts.partition, facts.path, facts.segments, facts.snapshots,
            facts.log_start_offset, facts.log_end_offset, selection.first_dirty_offset,
            selection.first_uncleanable_offset, NOW, self.config, run_id,
            grouping="kafka", map_memory_bytes=1 << 20, roll="due" if roll is not None and roll.is_due else "no",
        )  # fmt: skip

    @property
    def config(self) -> CompactionConfig:
        return CompactionConfig(
            cleanup_policy=frozenset({"compact"}),
            segment_bytes=self.segment_bytes,
            index_interval_bytes=INTERVAL_BYTES,
            delete_retention_ms=RETENTION_MS,
        )

    def recover(self, fs: FileSystem, root: Path) -> None:
        for log in self.logs:
            recover(fs, str(root / log.name))


def _is_not_run(task: CleaningTask, attempt: str) -> CleaningResult:
    raise AssertionError


@dataclass(frozen=True)
class Found:
    """The logs and checkpoints that a broker finds in a log dir, by the model of its loader."""

    logs: dict[str, Loaded]
    checkpoints: Entries

    def files(self) -> dict[str, Files]:
        return {name: files_of(loaded) for name, loaded in self.logs.items()}


@dataclass(frozen=True)
class Expected:
    """The expected result of a complete run from the state `before`."""

    before: Found
    files: dict[str, Files]
    checkpoints: Entries


def find(log_dir: LogDir, root: Path) -> Found:
    return Found({log.name: load_alike(root / log.name) for log in log_dir.logs}, read_checkpoint(root / CHECKPOINT))


def expect(log_dir: LogDir, found: Found) -> Expected:
    """Return the result of the reference model of the cleaner. Checkpoint entries of removed partitions remain until
    the first update.
    """
    files, entries = {}, dict(found.checkpoints)
    for log in log_dir.logs:
        before = found.checkpoints.get(log.name)
        loaded = log.rolled(found.logs[log.name]) if log_dir.rolls else found.logs[log.name]
        files[log.name], after = log.after_a_round(loaded, before, log_dir.segment_bytes)
        if after != before and after is not None:
            entries[log.name] = after
            entries.pop(GONE[0], None)
    return Expected(found, files, entries)


def judge(log_dir: LogDir, found: Found, run: Expected, *, ended: bool) -> None:
    """Check a state within a run: the promises, and that no checkpoint is above the cleaned segments."""
    files = found.files()
    for log in log_dir.logs:
        log.check_loaded(found.logs[log.name])
        before, after = run.before.checkpoints.get(log.name), run.checkpoints.get(log.name)
        now = found.checkpoints.get(log.name)
        assert now in (before, after), f"the checkpoint of {log.name} is {now}, neither {before} nor {after}"
        if ended or (now != before and now == after):
            assert now == after
            assert files[log.name] == run.files[log.name], f"the checkpoint of {log.name} is above the cleaned segments"
    assert found.checkpoints.keys() <= {log.name for log in log_dir.logs} | {GONE[0]}
    moved = found.checkpoints != run.before.checkpoints
    assert (GONE[0] in found.checkpoints) == (not moved and GONE[0] in run.before.checkpoints)


@dataclass(frozen=True)
class Replayed:
    """The transactions of a log: the first offsets of open ones by producer id, and the aborted and committed ones."""

    open_from: dict[int, int]
    aborted: tuple[Entry, ...]
    committed: tuple[Entry, ...]

    def is_aborted(self, batch: Batch) -> bool:
        return any(entry.covers(batch.producer_id, batch.base_offset) for entry in self.aborted)

    def is_committed(self, batch: Batch) -> bool:
        return any(entry.covers(batch.producer_id, batch.base_offset) for entry in self.committed)


class Entry(Aborted):
    """A transaction with data; if it was aborted, this equals its entry in the transaction index."""

    def covers(self, producer_id: int, offset: int) -> bool:
        return self.producer_id == producer_id and self.first_offset <= offset <= self.last_offset


def replay(logs: Mapping[int, bytes]) -> Replayed:
    open_from: dict[int, int] = {}
    ended: dict[bool, list[Entry]] = {True: [], False: []}
    for batch in [batch for _, log in sorted(logs.items()) for batch in decode_log(log)]:
        if batch.control and batch.records and batch.producer_id in open_from:
            first = open_from.pop(batch.producer_id)
            stable = min([*open_from.values(), batch.base_offset + 1])
            is_commit = batch.records[0].key == COMMIT_KEY
            ended[is_commit].append(Entry(batch.producer_id, first, batch.base_offset, stable))
        elif batch.transactional and not batch.control:
            open_from.setdefault(batch.producer_id, batch.base_offset)
    return Replayed(open_from, tuple(ended[False]), tuple(ended[True]))


def parse_entries(txn_index: bytes | None) -> list[Entry]:
    data = txn_index or b""
    return [Entry(*struct.unpack_from(">qqqq", data, at + 2)) for at in range(0, len(data), 34)]


def files_of(loaded: Loaded) -> Files:
    return {
        base: (segment.log, segment.index or b"", segment.time_index or b"", segment.txn_index or b"")
        for base, segment in loaded.segments.items()
    }


def end_of(logs: Mapping[int, bytes]) -> int:
    """Return the log end offset of a log, given as bytes by base offset."""
    batches = decode_log(logs[max(logs)])
    return batches[-1].last_offset + 1 if batches else max(logs)


def write_checkpoint(path: Path, entries: Entries) -> None:
    lines = [f"{name.rpartition('-')[0]} {name.rpartition('-')[2]} {at}\n" for name, at in sorted(entries.items())]
    path.write_text("".join(["0\n", f"{len(lines)}\n", *lines]))


def read_checkpoint(path: Path) -> Entries:
    """Read a checkpoint as strictly as a broker does; a missing file has no entries."""
    if not path.exists():
        return {}
    version, count, *lines = path.read_text().splitlines() or ["empty", "0"]
    assert version == "0" and int(count) == len(lines), path.read_text()
    fields = [line.split(" ") for line in lines]
    return {f"{topic}-{partition}": int(offset) for topic, partition, offset in fields}


def random_log(rng: random.Random, name: str) -> Log:
    """Return a random log in which, below the checkpoint, each key occurs once, as after a round."""
    first_dirty_segment, last = rng.choice([0, 0, 1, 2]), rng.randint(3, 4)
    unused = [f"k{n}" for n in range(6)]
    rng.shuffle(unused)
    segments: list[list[str]] = []
    for number in range(last + 1):
        batches = []
        for _ in range(rng.choice([0, 1, 1, 2]) if number else 1):
            words = [rng.choice(["", "", "!"]), rng.choice(["", "", "@1", "@2"]), rng.choice(["", "", "+2"])]
            for _ in range(rng.randint(1, 2)):
                clean_section = number < first_dirty_segment
                if clean_section and not unused:
                    break
                key = unused.pop() if clean_section else f"k{rng.randrange(6)}"
                words.append(f"{key}:{rng.choice(['-', '1', '2', '333'])}")
            if any(":" in word for word in words):
                batches.append(" ".join(words).strip())
        segments.append(batches or [f"f{number}:1"])
    log = Log(name, segments)
    checkpoint = list(log.segments)[first_dirty_segment] if first_dirty_segment else None
    return Log(name, segments, checkpoint)


def _batch(words: str, offset: int) -> tuple[bytes, int]:
    fields: dict[str, int] = {}
    records: list[Rec] = []
    for word in words.split():
        if word[0] == "!":
            fields["delete_horizon_ms"] = NOW - 1
        elif word[0] == "@":
            fields |= {"producer_id": int(word[1:]), "producer_epoch": 1, "base_sequence": 0}
        elif word[0] == "+":
            offset += int(word[1:])
        elif word[0] in "CA" and ":" not in word:
            horizon = fields.get("delete_horizon_ms")
            marker = encode_marker(
                offset, NOW - 10_000 + offset, commit=word[0] == "C", producer_id=int(word[1:]), producer_epoch=1,
                delete_horizon_ms=horizon,
            )  # fmt: skip
            return marker, offset + 1
        elif word[0] in "Tt" and ":" not in word:
            fields |= {"producer_id": int(word[1:]), "producer_epoch": 1, "base_sequence": 0, "transactional": 1}
        else:
            key, _, value = word.partition(":")
            at = offset + len(records)
            records.append(Rec(at, NOW - 10_000 + at, key.encode(), None if value == "-" else value.encode() * 20))
    return encode_batch(records, **fields), offset + len(records)


def _source(base: int, log: bytes, index: bytes, time_index: bytes, txn_index: bytes) -> Segment:
    return Segment(base, log, len(index), len(time_index), NOW - 5000, tuple(parse_entries(txn_index)))
