"""Random log dirs for kills, larger than those of tests/crash, and the options of `compact` for them.
tests/crash/compactions.py checks them.
"""

from __future__ import annotations

import random
from pathlib import Path

from tests.crash.compactions import INTERVAL_BYTES, NOW, RETENTION_MS, Log, LogDir
from tests.crash.test_compaction import SHAPES


def random_log_dir(rng: random.Random, *, sizes: tuple[int, ...], value_bytes: int, join: int | None = None) -> LogDir:
    """Return a partition for each of `sizes`, with that number of segments."""
    logs = tuple(_random_log(rng, f"orders-{n}", size, value_bytes) for n, size in enumerate(sizes))
    return LogDir(logs, join=rng.choice([1, 2, 3]) if join is None else join)


def small_log_dir(rng: random.Random) -> LogDir:
    """Return a log dir of tests/crash, some of which have transactions, or a random one of up to four partitions."""
    if rng.random() < 0.25:
        return SHAPES[rng.choice(sorted(SHAPES))]
    sizes = tuple(rng.randint(3, 7) for _ in range(rng.randint(1, 4)))
    return random_log_dir(rng, sizes=sizes, value_bytes=rng.choice([20, 200]))


def _random_log(rng: random.Random, name: str, segment_count: int, value_bytes: int) -> Log:
    """Return a random log in which, below the checkpoint, each key occurs once, as after a round."""
    clean_segments = rng.choice([0, 0, segment_count // 3])
    keys = [f"k{n}" for n in range(max(6, segment_count * 3))]
    unused = rng.sample(keys, len(keys))
    segments = []
    for number in range(segment_count + 1):
        batches = [
            _batch(rng, [unused.pop() for _ in range(rng.randint(1, 2)) if unused], value_bytes)
            if number < clean_segments
            else _batch(rng, rng.choices(keys, k=rng.randint(1, 4)), value_bytes)
            for _ in range(rng.randint(1, 3))
        ]
        segments.append([batch for batch in batches if ":" in batch] or [f"f{number}:1"])
    log = Log(name, segments)
    checkpoint = list(log.segments)[clean_segments] if clean_segments else None
    return Log(name, segments, checkpoint)


def _batch(rng: random.Random, keys: list[str], value_bytes: int) -> str:
    """Return a batch in the notation of `Log`, which repeats each value 20 times."""
    words = [rng.choice(["", "", "!"]), rng.choice(["", "", "@1", "@2"]), rng.choice(["", "", "+2"])]
    for key in keys:
        value = f"{rng.randrange(10**6)}".ljust(value_bytes // 20, "x")
        words.append(f"{key}:{'-' if rng.random() < 0.15 else value}")
    return " ".join(word for word in words if word)


def topic_config(log_dir: LogDir) -> list[str]:
    others = {log.name.rpartition("-")[0] for log in log_dir.logs} - {"orders"}
    return [
        *(f"{topic}:cleanup.policy=delete" for topic in sorted(others)),
        "orders:cleanup.policy=compact",
        f"orders:internal.segment.bytes={log_dir.segment_bytes}",
        f"orders:index.interval.bytes={INTERVAL_BYTES}",
        f"orders:delete.retention.ms={RETENTION_MS}",
    ]


def flags(log_dir: LogDir, root: Path, *more: str) -> list[str]:
    """Return the options of `keytail compact` for a round like that of the reference model."""
    configs = [word for text in topic_config(log_dir) for word in ("--topic-config", text)]
    fixed = ["--now", str(NOW), "--unsafe-clock", "--force", "--grouping", "kafka", "--map-memory", "1m"]
    fixed.append("--topics-have-no-overrides")
    return ["--log-dirs", str(root), *configs, *fixed, "--execute", "--output", "json", *more]
