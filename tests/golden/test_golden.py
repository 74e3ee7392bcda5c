"""The golden log dir agrees with the manifest, and its bytes contain the records that its broker served."""

from __future__ import annotations

import base64
import json
import lzma
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from keytail.config.keys import TOPIC_KEYS
from tests import golden
from tests.golden import generate
from tests.reference.batches import Batch, all_records, decode_log

LIMIT_BYTES = 5_000_000


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden.unpack(tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="module")
def batches(log_dir: Path) -> dict[tuple[str, int], list[Batch]]:
    """Decode every batch of every partition with the reference model, including its checksum."""
    return {
        (topic, number): [
            batch
            for path in sorted((log_dir / f"{topic}-{number}").glob("*.log"))
            for batch in decode_log(path.read_bytes())
        ]
        for topic, number in golden.partitions()
    }


def test_unpacking_gives_exactly_the_files_of_the_manifest(log_dir: Path) -> None:
    files = {entry["path"]: entry for entry in golden.manifest()["files"]}
    found = {path.relative_to(log_dir).as_posix(): path for path in log_dir.rglob("*") if path.is_file()}
    assert found.keys() == files.keys()
    for name, path in found.items():
        stat = path.stat()
        assert (stat.st_size, stat.st_mtime_ns) == (files[name]["size_bytes"], files[name]["mtime_ns"]), name
    assert sum(entry["size_bytes"] for entry in files.values()) < LIMIT_BYTES


def test_a_changed_byte_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = bytearray(lzma.decompress(golden.ARCHIVE.read_bytes()))
    packed[packed.index(b"user-0")] ^= 1
    changed = tmp_path / "changed.tar.xz"
    changed.write_bytes(lzma.compress(packed, preset=0))
    monkeypatch.setattr(golden, "ARCHIVE", changed)
    with pytest.raises(ValueError, match="differs from the committed file"):
        golden.unpack(tmp_path / "unpacked")


def test_generating_refuses_to_replace_existing_files(capsys: pytest.CaptureFixture[str]) -> None:
    before = golden.ARCHIVE.stat().st_mtime_ns
    assert generate.main([]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert golden.ARCHIVE.stat().st_mtime_ns == before


def test_the_broker_was_stopped_cleanly(log_dir: Path) -> None:
    assert json.loads((log_dir / ".kafka_cleanshutdown").read_text())["version"] == 0
    assert not (log_dir / ".lock").exists()
    meta = (log_dir / "meta.properties").read_text()
    assert f"cluster.id={golden.manifest()['cluster_id']}" in meta
    assert f"node.id={golden.manifest()['node_id']}" in meta


def test_no_file_contains_a_path_of_the_machine_that_generated_it(log_dir: Path) -> None:
    for path in log_dir.rglob("*"):
        if path.is_file():
            assert b"keytail-golden-" not in path.read_bytes(), path  # the name of the generator's temporary directory


def test_every_partition_belongs_to_a_topic_of_the_manifest(log_dir: Path) -> None:
    found = {path.name for path in log_dir.iterdir() if path.is_dir()}
    assert found == {f"{topic}-{number}" for topic, number in golden.partitions()} | {"__cluster_metadata-0"}


def test_topic_configs_are_supported_by_keytail() -> None:
    known = {key.name for key in TOPIC_KEYS} | golden.NOT_ABOUT_FILES
    for topic in golden.TOPICS.values():
        assert topic.configs.keys() <= known, topic.name


def test_properties_name_the_unpacked_log_dir(log_dir: Path) -> None:
    assert f"log.dirs={log_dir}" in (log_dir.parent / "server.properties").read_text().splitlines()


def test_the_files_contain_the_served_records(batches: dict[tuple[str, int], list[Batch]]) -> None:
    served: dict[tuple[str, int], list[Any]] = defaultdict(list)
    for topic, number, offset, timestamp_ms, _, key, value, headers in golden.record_rows():
        pairs = tuple((name.encode(), _bytes(content)) for name, content in headers)
        served[topic, number].append((offset, timestamp_ms, _bytes(key), _bytes(value), pairs))
    for (topic, number), found in batches.items():
        start, _ = golden.TOPICS[topic].offsets[number]
        records = all_records(batch for batch in found if not batch.attributes & 0x20)
        held = [(r.offset, r.timestamp, r.key, r.value, r.headers) for r in records if r.offset >= start]
        assert held == served[topic, number], (topic, number)


def test_the_bytes_cover_the_cases_of_the_readme(batches: dict[tuple[str, int], list[Batch]]) -> None:
    seen: Counter[str] = Counter()
    for found in batches.values():
        for batch in found:
            seen[f"codec {batch.attributes & 7}"] += 1
            seen["log append time"] += bool(batch.attributes & 0x08)
            seen["transactional"] += bool(batch.attributes & 0x10)
            seen["control"] += bool(batch.attributes & 0x20)
            seen["delete horizon"] += bool(batch.attributes & 0x40)
            seen["empty batch"] += batch.record_count == 0
            seen["idempotent"] += batch.producer_id >= 0 and not batch.attributes & 0x10
            last_sequence = batch.base_sequence + batch.last_offset - batch.base_offset
            seen["sequence that wraps"] += last_sequence > 2**31 - 1
            seen["leader epoch above 0"] += batch.leader_epoch > 0
            for record in batch.records:
                seen["tombstone"] += record.value is None
                seen["empty key"] += record.key == b""
                seen["no key"] += record.key is None
                seen["empty value"] += record.value == b""
                seen["null header value"] += any(value is None for _, value in record.headers)
    wanted = {f"codec {codec}" for codec in range(5)} | {
        "log append time",
        "transactional",
        "control",
        "delete horizon",
        "idempotent",
        "sequence that wraps",
        "leader epoch above 0",
        "tombstone",
        "empty key",
        "no key",
        "empty value",
        "null header value",
    }
    assert not {name for name in wanted if not seen[name]}, seen


def test_only_events_have_records_without_a_key(batches: dict[tuple[str, int], list[Batch]]) -> None:
    for (topic, _), found in batches.items():
        keyless = [record for record in all_records(found) if record.key is None]
        assert not keyless or topic == "events"


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)
