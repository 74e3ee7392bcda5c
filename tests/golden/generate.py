"""Regenerates the golden log dir: starts a real broker, sends the workload, stops the broker, and packs its files.

Run it as `python -m tests.golden.generate --overwrite`. Without the flag it refuses, because every new version of the
files permanently enlarges the repository. The same seed gives the same traffic, but not the same bytes: a broker adds
its own ids and times.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.golden import ARCHIVE, MANIFEST, RECORDS
from tests.golden.older import wait_for_cleaner
from tests.golden.workload import START_MS, Topic, topics, traffic
from tests.interop.broker import CLUSTER_ID, NODE_ID, Broker
from tests.interop.broker_client import BrokerClient, Served, to_wire

LIMIT_BYTES = 5_000_000
WRAPPING_PRODUCER = 900_001
GROUPS = [f"group-{number}" for number in range(8)]
MORE_TOPICS = {
    "transactional": "transactions of two producers, committed and aborted, and batches outside of any",
    "__consumer_offsets": "commits of eight groups, two of which were deleted",
    "__transaction_state": "what the transaction coordinator wrote for `transactional`",
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--overwrite", action="store_true", help="replace the committed bytes")
    options = parser.parse_args(arguments)
    if ARCHIVE.exists() and not options.overwrite:
        print(f"{ARCHIVE} exists: --overwrite replaces it", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="keytail-golden-") as work_dir:
        log_dir = Path(work_dir, "kafka-logs")
        described, records = write_log_dir(log_dir, Path(work_dir, "broker"), options.seed)
        pack(log_dir, described, records, options.seed)
    return 0


def write_log_dir(log_dir: Path, work_dir: Path, seed: int) -> tuple[dict[str, Any], list[Served]]:
    """Send everything. Return the topics as the broker describes them, and all records that it serves at the end."""
    plan = topics(int(time.time() * 1000))
    cleaning = {"log.cleaner.enable": "true", "log.cleaner.backoff.ms": "200"}
    with BrokerClient() as client:
        with Broker(log_dir, work_dir, properties=cleaning) as broker:
            client.connect(broker)
            _send(client, plan, seed, start=0)
            wait_for_cleaner(log_dir, [topic.name for topic in plan if 0 in topic.sent_to])
        with Broker(log_dir, work_dir) as broker:
            client.connect(broker)
            _send(client, plan, seed, start=1)
            _transactions(client)
            _groups(client)
            broker.stop()
            broker.start()
            client.connect(broker)
            _send(client, plan, seed, start=2)
            _wrapping_sequence(client)
            client.delete_records("compact-and-delete", 0, 350)
            return _describe(client, plan)


def _send(client: BrokerClient, plan: Iterable[Topic], seed: int, start: int) -> None:
    for topic in plan:
        if start not in topic.sent_to:
            continue
        if start == topic.sent_to[0]:
            client.create_topic(topic.name, topic.partitions, topic.configs)
        for partition in range(topic.partitions):
            for batch in traffic(topic, partition, seed, start):
                client.produce(
                    # Producers of the first broker are not reused, because the next broker has another port.
                    f"{topic.name} {batch.producer} {batch.codec}" + (" early" if start == 0 else ""),
                    topic.name,
                    partition,
                    batch.records,
                    codec=batch.codec,
                    idempotent=batch.producer.startswith("idempotent"),
                )


def _transactions(client: BrokerClient) -> None:
    client.create_topic("transactional", 1, {"cleanup.policy": "compact", "internal.segment.bytes": "16384"})
    for number in range(60):
        producer = f"tx-{number % 2}"
        client.transaction(producer, "begin", transactional_id=producer)
        for part in range(1 + number % 3):
            at_ms = START_MS + number * 1000 + part
            keys = [key * number % 40 for key in range(12)]
            records = [(at_ms, b"key-%d" % key, b"value %d %d" % (number, key)) for key in keys]
            client.produce(producer, "transactional", 0, records)
        client.transaction(producer, "abort" if number % 5 == 0 else "commit")
        if number % 7 == 0:
            client.produce("outside", "transactional", 0, [(START_MS + number * 1000, b"key-0", b"outside")])


def _groups(client: BrokerClient) -> None:
    """Commit offsets, in batches of one record each, over several small segments."""
    client.commit_offsets(GROUPS[0], "none", 0, [1])  # creates the topic
    client.alter_configs("__consumer_offsets", {"internal.segment.bytes": "8192"})
    for number, group in enumerate(GROUPS):
        client.commit_offsets(group, "none", number % 2, range(2, 90), note=f"by {group}")
    for group in GROUPS[:2]:
        client.delete_group(group)
    for group in GROUPS[2:]:
        client.commit_offsets(group, "none", 0, range(90, 110), note="later")


def _wrapping_sequence(client: BrokerClient) -> None:
    """Send two batches of one producer, the first of which exceeds the largest sequence number."""
    for base, count in ((2**31 - 8, 20), (12, 5)):
        at_ms = START_MS + 90_000_000 + base % 100
        records = [(at_ms + number, b"wrap-%d" % number, b"at %d" % base) for number in range(count)]
        error, _ = client.raw_produce("idempotent", 0, records, producer_id=WRAPPING_PRODUCER, epoch=3, sequence=base)
        if error != "NONE":
            raise RuntimeError(f"the answer to the batch with sequence {base} was {error}")


def _describe(client: BrokerClient, plan: Iterable[Topic]) -> tuple[dict[str, Any], list[Served]]:
    what = {topic.name: topic.what for topic in plan} | MORE_TOPICS
    described = client.describe_topics()
    all_partitions = [(name, n) for name in described for n in range(described[name]["partitions"])]
    offsets = client.offsets(all_partitions)
    for name, topic in described.items():
        topic["what"] = what[name]
        topic["transactional"] = name == "transactional"
        topic["offsets"] = [offsets[f"{name}-{n}"] for n in range(topic["partitions"])]
    in_order = {name: described[name] for name in what}
    return in_order, client.consume(all_partitions)


def pack(log_dir: Path, described: dict[str, Any], records: list[Served], seed: int) -> None:
    """Write the archive, the manifest and the records next to this module."""
    paths = sorted(path for path in log_dir.rglob("*") if path.is_file())
    total_bytes = sum(path.stat().st_size for path in paths)
    if total_bytes > LIMIT_BYTES:
        raise RuntimeError(f"{total_bytes} bytes exceed the limit for the repository ({LIMIT_BYTES})")
    files, buffer = [], io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path in paths:
            data, name = path.read_bytes(), path.relative_to(log_dir).as_posix()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
            digest = hashlib.sha256(data).hexdigest()
            mtime_ns = path.stat().st_mtime_ns
            files.append({"path": name, "size_bytes": len(data), "mtime_ns": mtime_ns, "sha256": digest})
    lines = "".join(json.dumps(to_wire(record), separators=(",", ":")) + "\n" for record in records)
    ARCHIVE.write_bytes(lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME))
    RECORDS.write_bytes(lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME))
    about = {
        "kafka": "4.3.1",
        "seed": seed,
        "cluster_id": CLUSTER_ID,
        "node_id": NODE_ID,
        "generated_ms": int(time.time() * 1000),
        "records": len(records),
        "size_bytes": total_bytes,
    }
    head = json.dumps(about | {"topics": described}, indent=1)[:-2]
    rows = ",\n".join("  " + json.dumps(entry) for entry in files)
    MANIFEST.write_text(f'{head},\n "files": [\n{rows}\n ]\n}}\n')
    packed_bytes = ARCHIVE.stat().st_size
    print(f"{len(files)} files, {total_bytes} bytes, {len(records)} records, packed {packed_bytes} bytes")


if __name__ == "__main__":
    sys.exit(main())
