"""Random logs cleaned by Kafka and by something else, side by side, several rounds with more traffic between.

Each round starts both from Kafka's result of the one before. A failing log's directories are kept under
target/failed and its seed is in the message; what the logs happened to exercise is counted.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from keytail.errors import KeytailError
from tests.interop.compare import differences
from tests.interop.kafka import TARGET, Cleaned, Kafka, KafkaError, Opened
from tests.interop.traffic import Traffic, random_traffic
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


@dataclass(frozen=True)
class Circumstances:
    """What holds for one round, on both sides. `map_max_entries` None: more than there are keys."""

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
    """What the other side chose (values by names of CHOICE) and where its round ended, None if none ran."""

    choice: Mapping[str, Any]
    end_offset: int | None


class Side(Protocol):
    """Cleans partition t-0 of a log dir in place. Raises where it refuses."""

    def __call__(self, log_dir: Path, now: Circumstances) -> Outcome: ...


def run_cases(
    kafka: Kafka,
    directory: Path,
    ours: Side,
    *,
    logs: int,
    rounds: int = 3,
    from_inside: bool = True,
    **traffic_options: Any,
) -> Counter[str]:
    """Run that many random logs and return what they exercised. The first difference fails.

    `from_inside` lets rounds start and end inside segments: small maps, checkpoints anywhere.
    """
    seed = os.environ.get("KEYTAIL_SEED") or str(random.SystemRandom().randrange(2**32))
    print(f"KEYTAIL_SEED={seed} KEYTAIL_FUZZ_LOGS={logs}")
    seen: Counter[str] = Counter()
    started = time.monotonic()
    for number in range(logs):
        rng = random.Random(f"{seed}-{number}")
        case = _Case(kafka, directory / f"log-{number}", rng, random_traffic(rng, **traffic_options), seen)
        case.from_inside = from_inside
        try:
            for _ in range(rounds):
                if not case.play(ours):
                    break
        except BaseException as problem:
            kept = TARGET / "failed" / f"{seed}-{number}"
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(case.home, kept)
            problem.add_note(f"KEYTAIL_SEED={seed}, log {number}, {case.now}; directories in {kept}")
            raise
        shutil.rmtree(case.home)
    seen["logs"] = logs
    print(f"{dict(sorted(seen.items()))} in {time.monotonic() - started:.1f} s")
    return seen


class _Case:
    """One random log: `source` is what a round starts from, `kafka` and `ours` what the two make of it."""

    def __init__(self, kafka: Kafka, home: Path, rng: random.Random, traffic: Traffic, seen: Counter[str]) -> None:
        self.harness, self.home, self.rng, self.traffic, self.seen = kafka, home, rng, traffic, seen
        self.source, self.kafka, self.ours = home / "source", home / "kafka", home / "ours"
        self.from_inside = True
        self.checkpoint: int | None = None
        self.now: Circumstances | None = None
        self.source.mkdir(parents=True)

    def play(self, ours: Side) -> bool:
        """One round. False when Kafka's cleaner threw, and there is no result to go on from."""
        before = self.traffic.options
        steps = self.traffic.steps()
        opened = self.harness.append(self.source / "t-0", steps, **before)
        self._set_mtimes()
        self.now = now = self._circumstances(opened)
        self._write_log_dir_files(now, opened)
        for copy in (self.kafka, self.ours):
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(self.source, copy)  # copy2: modification times are part of the input
        self.seen["rounds"] += 1
        try:
            theirs = self._kafka_round(now)
        except KafkaError as error:
            self.seen[f"Kafka threw {error.java_class}"] += 1
            self._refused_or_right(ours, now)
            return False
        outcome = ours(self.ours, now)
        other = [
            f"{name}: Kafka's {getattr(theirs, name)}, ours {outcome.choice[name]}"
            for name in CHOICE
            if getattr(theirs, name) != outcome.choice[name] and theirs.total_bytes  # 0 of 0 bytes is NaN
        ]
        assert not other, f"another choice of what to clean than Kafka's: {other}"
        assert outcome.end_offset == (theirs.end_offset if theirs.cleaned else None)
        found = differences(
            self.kafka / "t-0",
            self.ours / "t-0",
            index_interval_bytes=int(now.configs["index.interval.bytes"]),
        )
        assert not found, "\n".join(found)
        self._served_alike(now)
        self._count(theirs, now)
        self.checkpoint = theirs.end_offset if theirs.cleaned else self.checkpoint
        shutil.rmtree(self.source)
        shutil.copytree(self.kafka, self.source)
        return True

    def _circumstances(self, opened: Opened) -> Circumstances:
        rng, traffic = self.rng, self.traffic
        start, end = traffic.log_start_offset, traffic.log_end_offset
        if rng.random() < 0.7:
            traffic.pass_time()
        checkpoint = self.checkpoint
        if rng.random() < 0.15 and self.from_inside:
            checkpoint = rng.choice([None, rng.randint(start, end), end + 1, start - 1 if start else 0, end])
        return Circumstances(
            configs={**traffic.configs, **self._changed_configs(opened)},
            now_ms=traffic.clock_ms,
            log_start_offset=start,
            log_end_offset=end,
            high_watermark=end if rng.random() < 0.75 else rng.randint(start, end),
            checkpoint=checkpoint,
            map_max_entries=rng.choice([1, 2, 5, 20]) if rng.random() < 0.3 and self.from_inside else None,
            producer_id_expiration_ms=traffic.producer_id_expiration_ms,
        )

    def _changed_configs(self, opened: Opened) -> dict[str, Any]:
        """Now and then other limits than the segments were written with, hit exactly or missed by one."""
        rng = self.rng
        first = rng.randrange(len(opened.segments))
        run = opened.segments[first : first + rng.randint(2, 4)]
        changed: dict[str, Any] = {}
        if rng.random() < 0.2:
            changed["internal.segment.bytes"] = max(1, sum(one.log_bytes for one in run) - rng.randint(0, 1))
        if rng.random() < 0.1:
            largest = max(sum(one.index_bytes for one in run), sum(one.time_index_bytes for one in run))
            # Kafka cannot even load an active segment whose indexes outgrow the limit.
            active = opened.segments[-1]
            least = max(active.index_bytes, active.time_index_bytes) + 24
            changed["segment.index.bytes"] = max(largest - rng.randint(0, 1), least)
        if rng.random() < 0.1:
            changed["index.interval.bytes"] = rng.choice([0, 77, 300])
        return changed

    def _set_mtimes(self) -> None:
        """Times to the nanosecond, and not the same for the files of a segment: only the log's counts."""
        if self.rng.random() < 0.5:
            return
        for path in sorted((self.source / "t-0").iterdir()):
            age_ns = self.rng.randrange(3_600_000_000_000)
            os.utime(path, ns=(0, self.traffic.clock_ms * 1_000_000 - age_ns))

    def _write_log_dir_files(self, now: Circumstances, opened: Opened) -> None:
        write = self.harness.write_checkpoint
        checkpoints = {} if now.checkpoint is None else {"t-0": now.checkpoint, "other-1": 5}
        starts = {"t-0": now.log_start_offset} if now.log_start_offset > opened.segment_bases[0] else {}
        write(self.source / "cleaner-offset-checkpoint", checkpoints)
        write(self.source / "log-start-offset-checkpoint", starts)
        write(self.source / "replication-offset-checkpoint", {"t-0": now.high_watermark})
        write(self.source / "recovery-point-offset-checkpoint", {"t-0": now.log_end_offset})
        (self.source / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":42}')

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

    def _served_alike(self, now: Circumstances) -> None:
        """Kafka opens our result without repairing anything and reads what it reads from its own."""
        theirs, mine = (
            self.harness.load(path / "t-0", fetch=True, batches=True, **self._opening(now))
            for path in (self.kafka, self.ours)
        )
        assert mine.repaired == []
        assert mine.fetch_mismatches == ()
        assert mine.records == theirs.records
        assert mine.files == theirs.files
        assert (mine.log_start_offset, mine.log_end_offset) == (now.log_start_offset, now.log_end_offset)
        headers = [batch for batch in theirs.batches if batch["segment"] != theirs.segment_bases[-1]]
        self.seen["batches"] += len(headers)
        self.seen["batches without records"] += sum(batch["records"] == 0 for batch in headers)
        self.seen["batches with a horizon"] += sum(batch["delete_horizon_ms"] >= 0 for batch in headers)
        spans = zip(theirs.segment_bases, theirs.segment_bases[1:], strict=False)
        self.seen["segments that span 2^31 offsets"] += sum(end - base >= 2**31 for base, end in spans)
        self.seen["compressed batches"] += sum(batch["codec"] != "none" for batch in headers)

    def _refused_or_right(self, ours: Side, now: Circumstances) -> None:
        """Where Kafka's cleaner throws: ours changes nothing, or keeps each key's newest and invents nothing."""
        opening = self._opening(now)
        before = self.harness.load(self.source / "t-0", **opening)
        names = sorted(os.listdir(self.source / "t-0"))
        try:
            ours(self.ours, now)
        except (KeytailError, ValueError) as refusal:
            self.seen[f"ours refused with {type(refusal).__name__}"] += 1
            assert names == sorted(os.listdir(self.ours / "t-0"))
            for name in names:
                assert (self.source / "t-0" / name).read_bytes() == (self.ours / "t-0" / name).read_bytes()
            return
        after = self.harness.load(self.ours / "t-0", fetch=True, **opening)
        assert after.repaired == []
        assert after.fetch_mismatches == ()
        assert after.log_end_offset == now.log_end_offset
        # A message of magic 0 has no time; in a v2 batch by append time it shows the batch's.
        timeless = {record.offset for record in before.records if record.timestamp_ms == -1}
        after_records = [r._replace(timestamp_ms=-1) if r.offset in timeless else r for r in after.records]
        assert set(after_records) <= set(before.records)
        newest = _newest_offsets(self.source / "t-0", now.log_start_offset)
        kept = {record.offset for record in after.records}
        assert newest <= kept, f"newest of their keys, and gone: {sorted(newest - kept)}"

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


def _newest_offsets(partition: Path, log_start_offset: int) -> set[int]:
    """Offset of the newest record of each key that is neither a tombstone nor aborted, by the markers alone."""
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
