"""Small log dirs to compact as a whole, and the judges of every state that a stopped compaction leaves.

A run is what the driver does: resolve what the last run left, survey, select, clean every partition, then install
each and move its checkpoint. What it must leave says the dull twin of the cleaner, started on what the model of
Kafka's loader finds.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from keytail.clean.cleaner import CleaningTask, clean_partition
from keytail.clean.plan import CompactionConfig, select
from keytail.format.producers import ProducerEntry, encode_snapshot
from keytail.log import replace
from keytail.log.fs import FileSystem
from keytail.log.partition import hosted, survey_log_dirs, survey_partition
from keytail.spark.compact import Compaction
from keytail.spark.storage import ScratchSpace
from keytail.spark.tasks import Outcome
from tests.crash.partitions import NO_PRODUCERS, write_segment
from tests.crash.recorder import RecordingFileSystem
from tests.reference.batches import Rec, all_records, decode_log, encode_batch
from tests.reference.cleaner import Segment, clean
from tests.reference.indexing import index_files
from tests.reference.loader import Loaded, load

NOW = 1_750_000_000_000
RETENTION_MS = 1000
INTERVAL_BYTES = 50  # less than a batch: every batch but the first has an index entry
CHECKPOINT = "cleaner-offset-checkpoint"
GONE = ("gone-3", 7)  # a checkpoint entry of a partition that is not in the log dir

Files = dict[int, tuple[bytes, bytes, bytes]]  # log, index and time index by base offset
Entries = dict[str, int]


@dataclass(frozen=True)
class Log:
    """A partition in words. A segment is a list of batches, the last one is active; a batch is words:

    `k:v` a record, `k:-` a tombstone, `!` a delete horizon that has passed, `@7` producer 7, `+3` a gap before it.
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
        """Offsets of the tombstones that may go."""
        return {
            rec.offset
            for log in self.segments.values()
            for batch in decode_log(log)
            for rec in batch.records
            if rec.value is None and batch.delete_horizon_ms is not None and batch.delete_horizon_ms <= NOW
        }

    @cached_property
    def producers(self) -> dict[int, int]:
        """Last offset by producer id."""
        batches = [batch for log in self.segments.values() for batch in decode_log(log)]
        return {batch.producer_id: batch.last_offset for batch in batches if batch.producer_id >= 0}

    def make(self, log_dir: Path) -> None:
        path = log_dir / self.name
        path.mkdir(parents=True)
        for base, log in self.segments.items():
            write_segment(path, base, log, "")
            if base:
                (path / f"{base:020d}.snapshot").write_bytes(NO_PRODUCERS)
        entries = [ProducerEntry(pid, 1, 0, last, 0, NOW, -1, -1) for pid, last in self.producers.items()]
        (path / f"{self.end:020d}.snapshot").write_bytes(encode_snapshot(entries))
        (path / "leader-epoch-checkpoint").write_text("0\n1\n0 0\n")
        for file in path.iterdir():
            os.utime(file, ns=((NOW - 5000) * 10**6,) * 2)

    def judge(self, records: Sequence[Rec], end: int, bases: Sequence[int]) -> None:
        """Promises 1 and 2, of what a broker finds."""
        assert end == self.end, f"{self.name}: the log end is {end}, it was {self.end}"
        assert min(bases) == min(self.segments), f"{self.name}: the log starts at {min(bases)}"
        offsets = [rec.offset for rec in records]
        assert offsets == sorted(set(offsets)), f"{self.name}: offsets {offsets}"
        for rec in records:
            assert self.records.get(rec.offset) == rec, f"{self.name}: was not there before: {rec}"
        found = {rec.key: rec for rec in records}
        for key, newest in {rec.key: rec for rec in self.records.values()}.items():
            if key not in found:
                assert newest.offset in self.expired, f"{self.name}: lost {newest}"
            else:
                assert found[key] == newest, f"{self.name}: {found[key]} is visible again, {newest} is gone"

    def judge_loaded(self, loaded: Loaded) -> None:
        logs = {base: segment.log for base, segment in loaded.segments.items()}
        self.judge(loaded.records(), end_of(logs), list(logs))
        assert self.end in loaded.snapshots, f"{self.name}: the snapshot of the log end is gone"
        for base, segment in loaded.segments.items():
            indexes = (segment.index, segment.time_index)
            assert indexes == index_files(segment.log, base, INTERVAL_BYTES), f"{self.name}: indexes of {base}"

    def after_a_round(self, loaded: Loaded, first_dirty: int | None, segment_bytes: int) -> tuple[Files, int | None]:
        """What one more round leaves of what a broker finds, and the checkpoint after it."""
        left: Files = {b: (s.log, s.index or b"", s.time_index or b"") for b, s in loaded.segments.items()}
        active, start = max(left), min(left) if first_dirty is None else first_dirty
        closed = [base for base in left if base < active]
        dirty_from = max((base for base in closed if base <= start), default=0)
        if not self.compacted or start >= active or not any(left[b][0] for b in closed if b >= dirty_from):
            return left, first_dirty
        twin = clean(
            [Segment(base, *_sizes(files), mtime_ms=NOW - 5000) for base, files in sorted(left.items())],
            first_dirty=start,
            first_uncleanable=active,
            now_ms=NOW,
            delete_retention_ms=RETENTION_MS,
            segment_bytes=segment_bytes,
            index_interval_bytes=INTERVAL_BYTES,
            producers={pid: (last, 1) for pid, last in self.producers.items()},
        )
        for output in twin.segments:
            for base in output.source_bases:
                del left[base]
        left |= {output.base_offset: (output.log, output.index, output.time_index) for output in twin.segments}
        return left, twin.end_offset


@dataclass(frozen=True)
class LogDir:
    """`join`: as many segments as the first partition begins with fit into one."""

    logs: tuple[Log, ...]
    join: int = 1

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

    def run(self, fs: FileSystem, root: Path, run_id: str = "r1") -> None:
        """A whole run of the driver but for Spark: a bundle of all partitions."""
        with as_process(fs):
            self._run(fs, root, run_id)

    def _run(self, fs: FileSystem, root: Path, run_id: str) -> None:
        [listing] = survey_log_dirs(fs, [str(root)])
        compacted = {log.name for log in self.logs if log.compacted}
        tasks = []
        for entry in listing.partitions:
            if os.path.basename(entry.path) not in compacted:
                continue
            replace.recover(fs, entry.path)
            facts = survey_partition(fs, listing, entry)
            assert facts.problems == facts.leftovers == ()
            selection = select(facts, self.config, NOW, force=True)
            if not selection.eligible:
                continue
            tasks.append(
                CleaningTask(
                    facts.topic, facts.partition, facts.path, facts.segments, facts.snapshots,
                    facts.log_start_offset, facts.log_end_offset, selection.first_dirty_offset,
                    selection.first_uncleanable_offset, NOW, self.config, run_id,
                    grouping="kafka", map_memory_bytes=1 << 20,
                )
            )  # fmt: skip
        driver = Compaction(None, tasks, ScratchSpace(fs), {str(root): hosted([listing])}, fs=fs)
        results = [clean_partition(fs, task) for task in tasks]
        for task, result in zip(tasks, results, strict=True):
            row = driver._finish(task, Outcome(result, None))  # the driver's own order of install and checkpoint
            assert row.status == "compacted", row.error

    @property
    def config(self) -> CompactionConfig:
        return CompactionConfig(
            cleanup_policy=frozenset({"compact"}),
            segment_bytes=self.segment_bytes,
            index_interval_bytes=INTERVAL_BYTES,
            delete_retention_ms=RETENTION_MS,
        )

    def recover(self, fs: FileSystem, root: Path) -> None:
        with as_process(fs):
            for log in self.logs:
                replace.recover(fs, str(root / log.name))


@dataclass(frozen=True)
class Found:
    """What a broker would find in a log dir, by the model of its loader."""

    logs: dict[str, Loaded]
    checkpoints: Entries

    def files(self) -> dict[str, Files]:
        return {
            name: {b: (s.log, s.index or b"", s.time_index or b"") for b, s in loaded.segments.items()}
            for name, loaded in self.logs.items()
        }


@dataclass(frozen=True)
class Expected:
    """What a whole run leaves that begins with `before`."""

    before: Found
    files: dict[str, Files]
    checkpoints: Entries


def find(log_dir: LogDir, root: Path) -> Found:
    return Found({log.name: load(root / log.name) for log in log_dir.logs}, read_checkpoint(root / CHECKPOINT))


def expect(log_dir: LogDir, found: Found) -> Expected:
    """By the dull twin of the cleaner; entries of partitions that are gone stay until the first update."""
    files, entries = {}, dict(found.checkpoints)
    for log in log_dir.logs:
        before = found.checkpoints.get(log.name)
        files[log.name], after = log.after_a_round(found.logs[log.name], before, log_dir.segment_bytes)
        if after != before and after is not None:
            entries[log.name] = after
            entries.pop(GONE[0], None)
    return Expected(found, files, entries)


def judge(log_dir: LogDir, found: Found, run: Expected, *, ended: bool) -> None:
    """A state within a run: the promises, and no checkpoint ahead of the segments it speaks of."""
    files = found.files()
    for log in log_dir.logs:
        log.judge_loaded(found.logs[log.name])
        before, after = run.before.checkpoints.get(log.name), run.checkpoints.get(log.name)
        now = found.checkpoints.get(log.name)
        assert now in (before, after), f"the checkpoint of {log.name} is {now}, neither {before} nor {after}"
        if ended or (now != before and now == after):
            assert now == after
            assert files[log.name] == run.files[log.name], f"the checkpoint of {log.name} is ahead of its segments"
    assert found.checkpoints.keys() <= {log.name for log in log_dir.logs} | {GONE[0]}
    moved = found.checkpoints != run.before.checkpoints
    assert (GONE[0] in found.checkpoints) == (not moved and GONE[0] in run.before.checkpoints)


def end_of(logs: Mapping[int, bytes]) -> int:
    """The log end offset of segments by base."""
    batches = decode_log(logs[max(logs)])
    return batches[-1].last_offset + 1 if batches else max(logs)


def write_checkpoint(path: Path, entries: Entries) -> None:
    lines = [f"{name.rpartition('-')[0]} {name.rpartition('-')[2]} {at}\n" for name, at in sorted(entries.items())]
    path.write_text("".join(["0\n", f"{len(lines)}\n", *lines]))


def read_checkpoint(path: Path) -> Entries:
    """As strictly as a broker; a missing file has no entries."""
    if not path.exists():
        return {}
    version, count, *lines = path.read_text().splitlines() or ["empty", "0"]
    assert version == "0" and int(count) == len(lines), path.read_text()
    fields = [line.split(" ") for line in lines]
    return {f"{topic}-{partition}": int(offset) for topic, partition, offset in fields}


def random_log(rng: random.Random, name: str) -> Log:
    """Below its checkpoint each key stands once, as an earlier round left it."""
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
        else:
            key, _, value = word.partition(":")
            at = offset + len(records)
            records.append(Rec(at, NOW - 10_000 + at, key.encode(), None if value == "-" else value.encode() * 20))
    return encode_batch(records, **fields), offset + len(records)


def _sizes(files: tuple[bytes, bytes, bytes]) -> tuple[bytes, int, int]:
    log, index, time_index = files
    return log, len(index), len(time_index)


@contextmanager
def as_process(fs: FileSystem) -> Iterator[None]:
    """When a process dies, its descriptors close."""
    try:
        yield
    finally:
        if isinstance(fs, RecordingFileSystem):
            for fd in list(fs._open):
                fs.close(fd)
