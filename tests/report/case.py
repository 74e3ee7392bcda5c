"""Reports for tests: rows as commands produce them, of any number of partitions, with everything that a page can show.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import keytail.main.main  # noqa: F401 (declares the statuses of all commands)
from keytail.compact.detail import Detail, Part
from keytail.compact.map_phase.key_counts import HOTTEST, KeyCounts, hot_key
from keytail.errors import CORRUPT_REMEDY, CorruptLog, Refused
from keytail.report.facts import Report
from keytail.report.of_rows import partitions
from keytail.report.page import page
from keytail.run.rows import ResultRow
from tests.reference import key_counts as model

NOW_MS = 1_750_000_000_000
HOUR_MS = 3_600_000
EVIL = '<img src=x onerror="alert(1)">\x1b[31m\u202e</script><b>$x$&amp;'


def compacted(rng: random.Random, topic: str, number: int) -> ResultRow:
    parts = tuple(
        Part(1000 * n, 1, rng.randrange(1, 1 << 30), NOW_MS - (12 - n) * 9 * HOUR_MS, 1000, rng.randrange(1001))
        for n in range(rng.randrange(1, 12))
    )
    parts += (Part(1000 * len(parts), 1, 1 << 20, NOW_MS),)
    before = sum(part.log_bytes for part in parts)
    detail = Detail(
        clean_bytes=before // 3, dirty_bytes=before - before // 3, minimum_dirty_ratio=0.5,
        delete_retention_ms=24 * HOUR_MS, first_dirty_offset=rng.choice([0, 1000]), end_dirty_offset=12_000,
        parts=parts, keys=900, dirty_records=9_000, horizon_batches=number % 3, first_horizon_ms=NOW_MS + HOUR_MS,
        last_horizon_ms=NOW_MS + 2 * HOUR_MS,
        phases_s={"check": 0.2, "map": 3.0, "write": 4.5, "prove": 2.25, "replace": 0.5},
        key_counts=counts_of([rng.choice([1, 1, 1, 2, 3, 7, 40, number + 2]) for _ in range(50)], topic, number),
    )  # fmt: skip
    return ResultRow(
        topic, number, "/var/kafka/d0", "compacted", "", 0, 12_000, len(parts), 2, before, before // 4, 12_000, 3_000,
        17, 3, NOW_MS, NOW_MS + 1000 * rng.randrange(1, 60), detail=detail,
    )  # fmt: skip


def counts_of(numbers: Sequence[int], topic: str, partition: int, *, show: bool = False) -> KeyCounts:
    """Return the counts of a partition whose keys have these numbers of records; each key contains its topic and
    partition.
    """
    top = sorted(((number, 100 * n) for n, number in enumerate(numbers) if number > 1), reverse=True)[:HOTTEST]
    keys = [hot_key(*item, f"{topic}/{partition}/key-{item[1]}".encode(errors="replace"), show=show) for item in top]
    return KeyCounts(*model.by_size(numbers), tuple(keys))


def row(topic: str, number: int, status: str, error: str, problem: Any = None) -> ResultRow:
    size = 1 << 24
    return ResultRow(
        topic, number, "/var/kafka/d0", status, error, segments_before=3, segments_after=3, bytes_before=size,
        bytes_after=size, problem=problem,
    )  # fmt: skip


def refused(topic: str, number: int) -> ResultRow:
    problem = Refused(f"the range to be cleaned has {number + 1} records without a key",
                      path=f"/var/kafka/d0/{topic}-{number}", offset=number,
                      remedy="A compaction removes such records only with --drop-keyless")  # fmt: skip
    return row(topic, number, "refused", str(problem), problem)


def corrupt(topic: str, number: int) -> ResultRow:
    path = f"/var/kafka/d0/{topic}-{number}/00000000000000000392.log"
    problem = CorruptLog("batch has an invalid CRC", path=path, byte_position=7, remedy=CORRUPT_REMEDY)
    return row(topic, number, "corrupt", str(problem), problem)


def with_odd_keys(item: ResultRow) -> ResultRow:
    """Return the row with shown keys: text, an empty key, and keys that a page must escape."""
    assert item.detail is not None
    keys = [b"customer-42", b"", EVIL.encode(), b"\0\0\0\7" * 4, "kätzchen".encode(), b"k" * 5000, b"\xff" * 999,
            b"password=hunter2", "{{ keys }}\u202e\n".encode()]  # fmt: skip
    hot = [hot_key(10**9 // (n + 1), 10**12 + n, key, show=True) for n, key in enumerate(keys)]
    numbers = [1, 2, 3, 2**32 - 1, *(item.records for item in hot)]
    counts = KeyCounts(*model.by_size(numbers), (hot_key(2**32 - 1, 7, b"most", show=True), *hot))
    return replace(item, detail=replace(item.detail, key_counts=counts))


def rows_of_a_cluster(count: int, seed: int = 1) -> list[ResultRow]:
    """Return the rows of `count` partitions: one in ten is refused, one in 100 is corrupt, and one in five is skipped.
    """
    rng = random.Random(seed)
    rows: list[ResultRow] = []
    for n in range(count):
        topic = f"team-{n % 97}.orders.and.other.things.of.a.long.name.v{n % 31}"
        if n % 100 == 7:
            rows.append(corrupt(topic, n))
        elif n % 10 == 3:
            rows.append(refused(topic, n))
        elif n % 5 == 1:
            rows.append(row(topic, n, "skipped", f"dirty ratio 0.{n % 50} is not above min.cleanable.dirty.ratio 0.5"))
        else:
            rows.append(compacted(rng, topic, n))
    return rows


def report_of(rows: list[Any], **fields: Any) -> Report:
    known: dict[str, Any] = {
        "title": "compact", "command": "compact", "execute": True, "start_ms": NOW_MS, "end_ms": NOW_MS + 754_000,
        "now_ms": NOW_MS, "arguments": ("keytail", "compact", "--config", "/etc/kafka/server.properties", "--execute"),
        "settings": {"broker log.retention.hours": "168", "orders:cleanup.policy": "compact"}, "host": "broker-7",
        "user": "kafka", "versions": {"keytail": "1.2.3", "python": "3.11.7"}, "exit_status": 3,
        "next_step": "Next: run `keytail verify` on the same partitions, then start the broker.",
    }  # fmt: skip
    return Report(partitions=partitions(rows), **known | fields)


def pages_to_inspect() -> dict[str, str]:
    rng = random.Random(3)
    small = [compacted(rng, f"topic-{n}", n) for n in range(30)] + [corrupt("orders", 1), refused("users", 0)]
    error = f"{EVIL} {'x' * 300} /{'y' * 300}/z"
    hostile = [row(EVIL, 0, "refused", error), compacted(rng, "a" * 249, 1), compacted(rng, EVIL, 2)]
    shown = [with_odd_keys(compacted(rng, f"topic-{n}", n)) for n in range(3)]
    planned = [row("orders", n, "would-compact", "") for n in range(3)]
    verified = [row("orders", 0, "sound", "")]
    again = "Run the same command again to continue."
    return {
        "small": page(report_of(small)),
        "large": page(report_of(rows_of_a_cluster(10_000))),
        "evil": page(report_of(hostile, arguments=("keytail", EVIL, "z" * 400), settings={"k" * 200: "v" * 400})),
        "shown": page(report_of(shown)),
        "planned": page(report_of(planned, title="plan", command="plan", execute=False, exit_status=0)),
        "verified": page(report_of(verified, title="verify", command="verify", next_step="", exit_status=0)),
        "early": page(report_of(small[:3], ended_early="interrupted by SIGTERM", next_step=again)),
        "nothing": page(report_of([])),
    }
