"""Log dirs that real Kafka brokers of 2.8.2 and 3.6.2 wrote and closed cleanly, and the answers of those brokers.

`unpack` writes a copy for a test. `python -m tests.golden.older VERSION --overwrite` regenerates them, and README.md
describes their contents.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import os
import random
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
VERSIONS = ("2.8.2", "3.6.2")
START_MS = 1_700_000_000_000
SEED = 20
# Sizes below 1 MiB, which these brokers accept from 14 bytes on.
_SMALL = {"segment.bytes": "16384", "index.interval.bytes": "512"}
_COMPACT = {**_SMALL, "cleanup.policy": "compact"}
_CLEANED = {**_COMPACT, "min.cleanable.dirty.ratio": "0.01", "file.delete.delay.ms": "0"}
_NEVER_CLEANED = {"min.compaction.lag.ms": "315360000000"}  # ten years
_V0, _V1 = {"message.format.version": "0.9.0"}, {"message.format.version": "0.10.2"}
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")

# By topic: its own settings, its codecs, and its number of batches.
TOPICS: dict[str, tuple[dict[str, str], tuple[str, ...], int]] = {
    "out-of-order": (_COMPACT, ("none",), 60),
    "codecs": (_COMPACT, CODECS, 60),
    "append-time": ({**_COMPACT, "message.timestamp.type": "LogAppendTime"}, ("none", "gzip"), 40),
    "cleaned": (_CLEANED, ("none", "none", "lz4"), 120),
    "tiny-segments": ({**_COMPACT, "segment.bytes": "2048"}, ("none",), 8),
}
OLD_FORMATS: dict[str, tuple[dict[str, str], tuple[str, ...], int]] = {
    "v0": ({**_SMALL, **_V0}, ("none", "gzip"), 30),
    "v1": ({**_COMPACT, **_V1}, ("none", "none", "gzip"), 40),
    "v1-append-time": ({**_COMPACT, **_V1, "message.timestamp.type": "LogAppendTime"}, ("none",), 20),
    "v1-cleaned": ({**_CLEANED, **_V1}, ("none", "gzip"), 60),
}


def topics_of(version: str) -> dict[str, tuple[dict[str, str], tuple[str, ...], int]]:
    return TOPICS | OLD_FORMATS if version.startswith("2.") else TOPICS


def answers(version: str) -> dict[str, Any]:
    """Return `sha256` of the archive, `configs` of each topic, `offsets` by partition, and `times`.

    `times` are the broker's answers: (topic, time in ms, [offset, timestamp] of the first record at or after that time,
    or None).
    """
    found: dict[str, Any] = json.loads((HERE / f"older-{version}.json").read_text())
    return found


def unpack(version: str, dest: Path) -> Path:
    """Write the log dir to `dest`/kafka-logs, and return that path. Raises ValueError if a byte differs from the
    committed one.
    """
    packed = (HERE / f"older-{version}.tar.xz").read_bytes()
    if hashlib.sha256(packed).hexdigest() != answers(version)["sha256"]:
        raise ValueError(f"older-{version}.tar.xz differs from the committed file")
    log_dir = dest / "kafka-logs"
    log_dir.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(packed))) as archive:
        for member in archive:
            data = archive.extractfile(member)
            path = log_dir / member.name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"" if data is None else data.read())
            os.utime(path, (member.mtime, member.mtime))
    return log_dir


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", choices=VERSIONS)
    parser.add_argument("--overwrite", action="store_true", help="replace the committed bytes")
    options = parser.parse_args(arguments)
    if (HERE / f"older-{options.version}.tar.xz").exists() and not options.overwrite:
        print(f"older-{options.version}.tar.xz exists: --overwrite replaces it", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="keytail-golden-") as work_dir:
        log_dir = Path(work_dir, "kafka-logs")
        pack(options.version, log_dir, write_log_dir(options.version, log_dir, Path(work_dir, "broker")))
    return 0


def write_log_dir(version: str, log_dir: Path, work_dir: Path) -> dict[str, Any]:
    """Send everything, and return the broker's answers at the end."""
    from tests.interop.broker_client import BrokerClient
    from tests.versions_of_kafka.broker import broker_of

    topics, rng = topics_of(version), random.Random(SEED)
    properties = {
        "log.cleaner.enable": "true",
        "log.cleaner.backoff.ms": "200",
        # A cleaner appends the contents of a buffer of half this size as one set, with one entry in each index.
        "log.cleaner.io.buffer.size": "4096",
        "offsets.topic.num.partitions": "1",
    }
    with BrokerClient() as client, broker_of(version, log_dir, work_dir, properties=properties) as broker:
        client.connect(broker)
        for name, (configs, codecs, batches) in topics.items():
            waits = {} if "cleaned" in name or "cleanup.policy" not in configs else _NEVER_CLEANED
            client.create_topic(name, 1, {**configs, **waits})
            for number in range(batches):
                codec = rng.choice(codecs)
                client.produce(f"{name} {codec}", name, 0, _records(rng, number), codec=codec)
        _transactions(client)
        wait_for_cleaner(log_dir, [name for name in topics if "cleaned" in name])
        names = [*topics, "transactional"]
        times = [
            [name, at, client.offsets_for_times(name, 0, [at])[0]]
            for name in names
            for at in [0, *(START_MS + rng.randrange(70_000) for _ in range(30))]
        ]
        described = client.describe_topics()
        offsets = client.offsets([(name, 0) for name in described if not name.startswith("__")])
        return {"configs": {n: t["configs"] for n, t in described.items()}, "offsets": offsets, "times": times}


def _records(rng: random.Random, number: int) -> list[tuple[int, bytes, bytes | None]]:
    """Return the records of a batch: timestamps are unordered, and some repeated; a tenth are tombstones."""
    return [
        (
            START_MS + number * 1000 + rng.randrange(0, 3000, 50),
            b"key-%d" % int(80 * rng.random() ** 2),
            None if rng.random() < 0.1 else b"value %d " % number + b"x" * rng.randrange(60),
        )
        for _ in range(rng.choice((1, 2, 10, 30)))
    ]


def _transactions(client: Any) -> None:
    client.create_topic("transactional", 1, {**_COMPACT, "segment.bytes": "8192", **_NEVER_CLEANED})
    for number in range(40):
        producer = f"tx-{number % 2}"
        client.transaction(producer, "begin", transactional_id=producer)
        records = [(START_MS + number * 1000 - key, b"key-%d" % key, b"in %d" % number) for key in range(12)]
        client.produce(producer, "transactional", 0, records)
        client.transaction(producer, "abort" if number % 4 == 0 else "commit")
    client.wait_until_decided([("transactional", 0)])


def wait_for_cleaner(log_dir: Path, names: list[str]) -> None:
    """Wait until the broker has cleaned these topics up to their active segments, and has removed the replaced
    segments.
    """
    give_up = time.monotonic() + 300
    waiting = set(names)
    while waiting:
        checkpoint = log_dir / "cleaner-offset-checkpoint"
        lines = checkpoint.read_text().splitlines()[2:] if checkpoint.exists() else []
        cleaned_to = {line.split()[0]: int(line.split()[2]) for line in lines}
        for name in sorted(waiting):
            files = list((log_dir / f"{name}-0").iterdir())
            active = max(int(path.name[:20]) for path in files if path.suffix == ".log")
            if cleaned_to.get(name) == active and not any(path.suffix == ".deleted" for path in files):
                waiting.discard(name)
        if time.monotonic() > give_up:
            raise RuntimeError(f"not cleaned after 300 s: {sorted(waiting)}")
        time.sleep(0.1)


def pack(version: str, log_dir: Path, answered: dict[str, Any]) -> None:
    """Write the archive and the answers next to this module."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path in sorted(path for path in log_dir.rglob("*") if path.is_file()):
            data = path.read_bytes()
            member = tarfile.TarInfo(path.relative_to(log_dir).as_posix())
            member.size, member.mtime = len(data), int(path.stat().st_mtime)
            archive.addfile(member, io.BytesIO(data))
    packed = lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME)
    (HERE / f"older-{version}.tar.xz").write_bytes(packed)
    about = {"kafka": version, "sha256": hashlib.sha256(packed).hexdigest(), **answered}
    (HERE / f"older-{version}.json").write_text(json.dumps(about, separators=(",", ":")) + "\n")
    print(f"{len(buffer.getvalue())} bytes, packed {len(packed)} bytes")


if __name__ == "__main__":
    sys.exit(main())
