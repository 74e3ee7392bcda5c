"""Compares a full read of compacted topics before and after a repack. `python -m tests.bench.full_read`.

A real broker writes a changelog in each of two codecs, and `__consumer_offsets`. keytail compacts them, so that batches
of few records are left. Then Kafka's consumer reads each topic from its beginning into a map of the latest values, as
Kafka Streams restores a table and a coordinator loads its partition: before the repack, after one that only merges, and
after one that also compresses with zstd. The topics are in the page cache. Prints bytes, batches, and the median of the
seconds; both reads must give the same number of records and keys.
"""

from __future__ import annotations

import argparse
import random
import statistics
import struct
import sys
import tempfile
from pathlib import Path

from tests.bench.report import machine
from tests.interop.broker import Broker
from tests.interop.broker_client import BrokerClient
from tests.interop.broker_story import keytail

OFFSETS = "__consumer_offsets"
CODECS = ("none", "lz4")
BATCH_BYTES = 16_384  # the default of Kafka's producers
UPDATES_PER_KEY = 20
COMMITS_PER_GROUP = 12
REPACK = ("--repack", "--forget-producers")
STATES = {"compacted": (), "repacked": REPACK, "repacked, zstd": (*REPACK, "--compression", "zstd")}


def write_updates(path: Path, records: int, seed: int) -> None:
    """Write updates of random keys for `BrokerClient.produce_file`, with values of 100 bytes that compress to about a
    half."""
    rng = random.Random(seed)
    with path.open("wb") as file:
        file.write(struct.pack(">i", records))
        for number in range(records):
            key = b"user-%012d" % rng.randrange(records // UPDATES_PER_KEY)
            value = b"%050d" % number + rng.randbytes(25).hex().encode()
            file.write(struct.pack(">qi", 1_700_000_000_000 + number, len(key)) + key)
            file.write(struct.pack(">i", len(value)) + value)


def fill(client: BrokerClient, home: Path, records: int, groups: int) -> None:
    write_updates(home / "records.bin", records, seed=7)
    settings = {"cleanup.policy": "compact", "segment.bytes": str(16 << 20)}
    for codec in CODECS:
        client.create_topic(f"changelog-{codec}", 1, settings)
        client.produce_file(f"changelog-{codec}", home / "records.bin", codec=codec, batch_bytes=BATCH_BYTES)
    for number in range(groups):
        client.commit_offsets(f"group-{number:05d}", f"changelog-{CODECS[0]}", 0, range(1, COMMITS_PER_GROUP + 1))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.full_read", description=__doc__)
    parser.add_argument("--records", type=int, default=4_000_000, metavar="N", help="updates of each changelog")
    parser.add_argument("--groups", type=int, default=1500, metavar="N", help="consumer groups")
    parser.add_argument("--runs", type=int, default=5, metavar="N")
    options = parser.parse_args(arguments)
    topics = [*(f"changelog-{codec}" for codec in CODECS), OFFSETS]
    found: dict[str, dict[str, tuple[float, ...]]] = {topic: {} for topic in topics}
    with tempfile.TemporaryDirectory(prefix="keytail-bench-") as folder:
        home = Path(folder)
        properties = {
            "offsets.topic.segment.bytes": str(1 << 20),
            "offsets.topic.num.partitions": "1",
            "producer.id.expiration.ms": "1",
        }
        broker = Broker(home / "logs", home / "work", heap="1g", properties=properties)
        given = ("--config", home / "work" / "server.properties", "--metadata-is-current")
        with BrokerClient(heap="2g") as client:
            with broker:
                client.connect(broker)
                fill(client, home, options.records, options.groups)
            keytail("compact", *given, "--force", "--roll-active", "--execute", ends_with=(0,))
            batches: dict[str, list[int]] = {}  # by topic, in each state
            for state, flags in STATES.items():
                rows = keytail("compact", *given, *flags, "--execute", ends_with=(0,)) if flags else []
                for row in rows:
                    batches.setdefault(row["topic"], [row["batches_before"]]).append(row["batches_after"])
                with broker:
                    client.connect(broker)
                    for topic in topics:
                        reads = [client.restore([(topic, 0)]) for _ in range(options.runs + 1)][1:]
                        found[topic][state] = (
                            sum(log.stat().st_size for log in (home / "logs" / f"{topic}-0").glob("*.log")),
                            statistics.median(read["seconds"] for read in reads),
                            reads[0]["records"],
                            reads[0]["keys"],
                        )
    for name, fact in machine().items():
        print(f"{name}: {fact}")
    print(f"{options.records} updates of each changelog, {options.groups} groups, {options.runs} reads")
    same = True
    for topic, states in found.items():
        for (state, (size, seconds, records, keys)), count in zip(states.items(), batches[topic], strict=True):
            ratio = states["compacted"][1] / seconds
            print(f"{topic:<20} {state:<16} {size:>12,} bytes {count:>9,} batches {seconds:7.3f} s  {ratio:4.1f}")
            same &= (records, keys) == states["compacted"][2:]
    print("the same records in each state" if same else "THE RECORDS DIFFER")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
