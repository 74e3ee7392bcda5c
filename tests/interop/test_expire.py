"""`expire` removes the same segments as Kafka's retention, on random logs at a fixed clock; all other files are equal.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from keytail.cli.configuration import Configuration
from keytail.cli.selection import PartitionFilter
from keytail.config.resolve import Setting, from_command_line
from keytail.expire.command import ExpireRow, Request
from keytail.expire.driver import expire
from keytail.log.fs import LOCAL
from keytail.log.log_dirs import survey_log_dirs
from keytail.log.partition import survey_partition
from tests.chance import SEED, cases
from tests.interop.kafka import CLOCK_MS, Kafka, Retained, step_batch, step_delete_records, step_raw, step_roll
from tests.interop.traffic import DAY_MS, Traffic, random_traffic
from tests.reference.batches import Rec
from tests.reference.legacy import encode_single

pytestmark = pytest.mark.interop

LOGS = int(os.environ.get("KEYTAIL_FUZZ_LOGS", "0")) or 35
DRAWS = 4  # how often settings, clock and high watermark are drawn for each log


def aged_traffic(rng: random.Random) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the steps and configs of a log with few batches per segment, and segments of any age in any order."""
    steps: list[dict[str, Any]] = []
    epoch = offset = 0
    for _ in range(rng.randint(1, 8)):
        kind = rng.choice(["rising", "rising", "rising", "none", "old formats", "future", "zero", "empty"])
        begin_ms = CLOCK_MS - rng.randint(0, 12) * DAY_MS
        for _ in range(0 if kind == "empty" else rng.randint(1, 4)):
            epoch += rng.random() < 0.3
            at_ms = {"none": -1, "zero": 0, "future": begin_ms + 30 * DAY_MS}.get(kind, begin_ms + rng.randint(0, 9))
            if kind == "old formats":
                magic = rng.choice([0, 0, 1])
                steps.append(step_raw(encode_single(Rec(offset, at_ms, b"k", b"v"), magic=magic), epoch))
                offset += 1
                continue
            records = [(at_ms, b"k%d" % rng.randint(0, 9), b"v" * rng.choice([0, 9, 200])) for _ in range(2)]
            steps.append(step_batch(records, leader_epoch=epoch))
            offset += 2
        if offset and rng.random() < 0.9:
            steps.append(step_roll())
    if not offset:
        steps.insert(0, step_batch([(CLOCK_MS, b"k", b"v")]))
        offset = 1
    if rng.random() < 0.4:
        steps.append(step_delete_records(rng.randint(0, offset - 1)))
    return steps, {"internal.segment.bytes": 10_000, "index.interval.bytes": rng.choice([0, 100, 4096])}


def make_log(kafka: Kafka, rng: random.Random, path: Path) -> tuple[dict[str, Any], int]:
    """Write a log to `path` with Kafka, close it, and return its configs and its log start offset."""
    if rng.random() < 0.5:
        steps, configs = aged_traffic(rng)
        start = next((step["log_start_offset"] for step in steps if "log_start_offset" in step), 0)
        kafka.append(path, steps, configs={**configs, "retention.ms": -1})
        return configs, start
    traffic: Traffic = random_traffic(rng, transactional=rng.random() < 0.5, legacy=rng.random() < 0.3)
    for _ in range(rng.randint(1, 3)):
        options = traffic.options
        kafka.append(path, traffic.steps(), **options)
    return traffic.configs, traffic.log_start_offset


def set_file_times(rng: random.Random, path: Path) -> None:
    for log in sorted(path.glob("*.log")):
        ms = CLOCK_MS + rng.choice([0, DAY_MS, -rng.randint(0, 12 * DAY_MS)])
        os.utime(log, ns=(ms * 1_000_000, ms * 1_000_000 + rng.randint(0, 999_999)))


def draw_settings(rng: random.Random, facts: Any, ages: list[int]) -> tuple[dict[str, Any], int, int]:
    """Draw settings, clock and high watermark, often so that a limit is met exactly."""
    now_ms = CLOCK_MS + rng.choice([0, 1, DAY_MS, rng.randint(0, 12 * DAY_MS)])
    sizes = [segment.log_bytes for segment in facts.segments]
    total = sum(sizes)
    first = rng.randint(0, len(sizes))
    exact_ms = max(now_ms - rng.choice(ages) + rng.choice([-1, 0, 1]), 0)
    retention_bytes = rng.choice([-1, -1, 0, total, total + 1, rng.randint(0, total)])
    if rng.random() < 0.4:
        retention_bytes = max(total - sum(sizes[:first]) + rng.choice([-1, 0, 1]), 0)
    configs = {
        "cleanup.policy": rng.choice(["delete", "delete", "delete", "compact,delete", "compact", ""]),
        "retention.ms": rng.choice([-1, 0, 1, exact_ms, exact_ms, rng.randint(0, 20 * DAY_MS)]),
        "retention.bytes": retention_bytes,
    }
    end, start = facts.log_end_offset, facts.log_start_offset
    bases = [segment.base_offset for segment in facts.segments if segment.base_offset >= start]
    high_watermark = rng.choice([end, end, end, end, rng.choice([*bases, end]), rng.randint(start, end)])
    return configs, now_ms, high_watermark


def as_log_dir(log_dir: Path, start: int, end: int, high_watermark: int) -> None:
    """Write the checkpoints of a broker. They have a log start offset only if it is above the base offset of the first
    segment.
    """
    (log_dir / ".kafka_cleanshutdown").touch()
    first = min(int(path.stem) for path in (log_dir / "t-0").glob("*.log"))
    notes = {"replication-offset-checkpoint": high_watermark, "recovery-point-offset-checkpoint": end}
    if start > first:
        notes["log-start-offset-checkpoint"] = start
    for name, offset in notes.items():
        (log_dir / name).write_text(f"0\n1\nt 0 {offset}\n")


def survey(log_dir: Path) -> Any:
    [listing] = survey_log_dirs(LOCAL, [str(log_dir)])
    facts = survey_partition(LOCAL, listing, listing.partitions[0])
    assert facts.problems == ()
    return facts


def keytail_expire(log_dir: Path, configs: dict[str, Any], now_ms: int) -> ExpireRow:
    settings = from_command_line([f"t:{name}={value}" for name, value in configs.items()])
    configuration = Configuration(settings, {"log.dirs": Setting((str(log_dir),), "server.properties")}, True)
    request = Request(PartitionFilter((str(log_dir),)), configuration, execute=True, now_ms=now_ms, unsafe_clock=True)
    [row] = expire(request)
    return row


def files_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_the_same_segments_are_removed_and_all_other_files_are_equal(
    kafka: Kafka, fast_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts: Counter[str] = Counter()
    wanted = ("log-start", "size", "time", "kept", "expired", "all segments")
    for number in cases(LOGS, lambda: all(counts[reason] for reason in wanted)):
        rng = random.Random(f"{SEED} {number}")
        home = fast_dir / str(number)
        written, start = make_log(kafka, rng, home / "source" / "t-0")
        set_file_times(rng, home / "source" / "t-0")
        opened = kafka.load(home / "source" / "t-0", records=False, log_start_offset=start, configs=written)
        as_log_dir(home / "source", start, opened.log_end_offset, opened.log_end_offset)
        facts = survey(home / "source")
        ages = [segment.largest_timestamp_ms for segment in opened.segments]
        for draw in range(DRAWS):
            label = f"log {number}, draw {draw}"
            configs, now_ms, high_watermark = draw_settings(rng, facts, ages)
            for side in ("kafka", "keytail"):
                shutil.copytree(home / "source", home / side)
            theirs = kafka.expire(
                home / "kafka" / "t-0", log_start_offset=start, high_watermark=high_watermark, clock_ms=now_ms,
                configs=written | configs,
            )  # fmt: skip
            as_log_dir(home / "keytail", start, opened.log_end_offset, high_watermark)
            ours = keytail_expire(home / "keytail", configs, now_ms)
            compare(label, home, theirs, ours)
            for segment in ours.expired:
                counts[segment.reason] += 1
            counts[ours.status] += 1
            counts["all segments"] += ours.log_start_after == ours.log_end_offset and bool(ours.expired)
            if draw == 0:
                again = keytail_expire(home / "keytail", configs, now_ms)
                assert (again.status, again.notes) == ("kept", ()), label
                after = kafka.load(
                    home / "keytail" / "t-0", log_start_offset=theirs.log_start_offset, configs=written | configs,
                    clock_ms=now_ms, fetch=True,
                )  # fmt: skip
                assert (after.log_end_offset, after.fetch_mismatches) == (opened.log_end_offset, ()), label
                assert not after.warnings, label
            for side in ("kafka", "keytail"):
                shutil.rmtree(home / side)
        shutil.rmtree(home)
    with capsys.disabled():
        print(f"\nexpire, seed {SEED}: {dict(counts)}")


def compare(label: str, home: Path, theirs: Retained, ours: ExpireRow) -> None:
    assert ours.status == ("expired" if theirs.deleted else "kept"), f"{label}: {ours}"
    assert len(ours.expired) == theirs.deleted, f"{label}: {ours}"
    assert ours.findings == (), label
    expected, found = files_of(home / "kafka" / "t-0"), files_of(home / "keytail" / "t-0")
    assert found.keys() == expected.keys(), label
    differing = [name for name in found if found[name] != expected[name]]
    assert not differing, f"{label}: {differing}"
    facts = survey(home / "keytail")
    assert facts.log_start_offset == ours.log_start_after == theirs.log_start_offset, label
    assert facts.log_end_offset == theirs.log_end_offset, label
