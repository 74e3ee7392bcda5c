"""`compact --repack` as an operator runs it: dry run, changes, refusals, backup and undo, the ledger."""

from __future__ import annotations

import base64
import json
import shutil
import time
from pathlib import Path

import pytest

from keytail.compact.repack import partition as repacking
from keytail.log.fs import FileSystem
from tests.command_line import Run, rows_of
from tests.log_dirs import random_records, records_of, snapshot, write_log_dir
from tests.reference import metadata as model
from tests.reference.batches import Rec, decode_log, encode_batch

MAX = ("--topic-config", "max.message.bytes=1000000")
UNCLEAN = ("--topic-config", "unclean.leader.election.enable=false")
KNOWN = ("--topics-have-no-overrides", *MAX, *UNCLEAN)


def flags(log_dir: Path, *more: str | Path) -> tuple[str | Path, ...]:
    return "compact", "--log-dirs", log_dir, *KNOWN, "--repack", "--replicas-in-sync", "--output", "json", *more


def batches(partition: Path) -> list[int]:
    return [len(decode_log(log.read_bytes())) for log in sorted(partition.glob("*.log"))]


def test_a_dry_run_changes_nothing(run: Run, log_dir: Path) -> None:
    before = snapshot(log_dir)
    result = run(*flags(log_dir))
    assert result.exit_code == 0, result.stderr
    assert {row["status"] for row in rows_of(result).values()} == {"would-repack"}
    assert snapshot(log_dir) == before
    table = run("compact", "--log-dirs", log_dir, *KNOWN, "--repack", "--replicas-in-sync")
    assert "Dry run: nothing was changed" in table.stdout
    assert "run the same command with --execute" in table.stderr


def test_batches_are_merged_whatever_the_policy_and_a_second_run_changes_nothing(run: Run, log_dir: Path) -> None:
    (log_dir / "cleaner-offset-checkpoint").write_text("0\n1\norders 0 250\n")
    before = {path.name: records_of(path) for path in log_dir.glob("*-*") if path.is_dir()}
    assert batches(log_dir / "users-0") == [10, 10, 10, 10]
    result = run(*flags(log_dir, "--execute"))
    rows = rows_of(result)
    assert result.exit_code == 0, result.stderr
    assert {row["status"] for row in rows.values()} == {"repacked"}
    for name, records in before.items():
        assert records_of(log_dir / name) == records
        assert batches(log_dir / name) == [1, 1, 1, 10]
        row = rows[name]
        assert (row["batches_before"], row["batches_after"]) == (30, 3)
        assert (row["records_before"], row["records_after"]) == (300, 300)
        assert row["segments_before"] == row["segments_after"] == 4
        assert row["bytes_after"] == sum(log.stat().st_size for log in (log_dir / name).glob("*.log"))
        assert row["bytes_after"] < row["bytes_before"]
    assert (log_dir / "cleaner-offset-checkpoint").read_text() == "0\n1\norders 0 250\n"
    again = snapshot(log_dir)
    result = run(*flags(log_dir, "--execute"))
    assert {row["status"] for row in rows_of(result).values()} == {"clean"}
    assert result.exit_code == 0
    assert snapshot(log_dir) == again


def test_the_table_counts_batches(run: Run, log_dir: Path) -> None:
    result = run("compact", "--log-dirs", log_dir, *KNOWN, "--repack", "--replicas-in-sync", "--execute")
    assert "30 -> 3" in result.stdout
    assert "90 -> 9 batches" in result.stdout
    assert "keytail verify" in result.stderr
    again = run("compact", "--log-dirs", log_dir, *KNOWN, "--repack", "--replicas-in-sync", "--execute")
    assert "No batch was changed" in again.stderr
    verified = run("verify", "--log-dirs", log_dir)
    assert verified.exit_code == 0, verified.stdout


def test_compression_applies_to_every_batch_below_the_active_segment(run: Run, log_dir: Path) -> None:
    result = run(*flags(log_dir, "--execute", "--compression", "zstd:19", "--batch-bytes", "0"))
    assert result.exit_code == 0, result.stderr
    logs = sorted((log_dir / "orders-0").glob("*.log"))
    codecs = [{batch.codec for batch in decode_log(log.read_bytes())} for log in logs]
    assert codecs == [{4}, {4}, {4}, {0}]
    assert batches(log_dir / "orders-0") == [10, 10, 10, 10]


def test_a_backup_restores_every_file(run: Run, log_dir: Path, tmp_path: Path) -> None:
    (log_dir / "cleaner-offset-checkpoint").write_text("0\n1\norders 0 399\n")
    before = snapshot(log_dir)
    result = run(*flags(log_dir, "--execute", "--keep-originals", tmp_path / "kept"))
    assert {row["status"] for row in rows_of(result).values()} == {"repacked"}
    run_id = next(path.name for path in (tmp_path / "kept").iterdir())
    undone = run("undo", "--originals", tmp_path / "kept", "--run", run_id, "--execute")
    assert undone.exit_code == 0, undone.output
    assert snapshot(log_dir) == before


def test_the_ledger_names_the_run(run: Run, log_dir: Path, tmp_path: Path) -> None:
    result = run(*flags(log_dir, "--execute", "--ledger", tmp_path / "ledger"))
    assert result.exit_code == 0, result.stderr
    shown = json.loads(run("history", "--ledger", tmp_path / "ledger", "--output", "json").stdout)
    assert [(row["command"], row["status"], row["partitions"]) for row in shown] == [("compact --repack", "done", 3)]
    assert shown[0]["counts"] == {"repacked": 3}
    assert shown[0]["bytes_after"] < shown[0]["bytes_before"]


def test_a_repack_has_a_page(run: Run, log_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    page = tmp_path / "page.html"
    run(*flags(log_dir, "--report", page))
    assert "3 of 3 partitions would be repacked" in page.read_text()
    result = run(*flags(log_dir, "--execute", "--report", page))
    assert result.exit_code == 0, result.stderr
    assert "Repacked 3 of 3 partitions:" in page.read_text()


@pytest.mark.parametrize(
    "more",
    [
        ("--prepare",), ("--roll-active",), ("--fan-out", "always"), ("--fan-out", "never"), ("--grouping", "kafka"),
        ("--map-memory", "1g"), ("--force",), ("--from-log-start",), ("--drop-keyless",), ("--message-format", "keep"),
        ("--broker-version", "2.8"), ("--output-dir", "/tmp/x"),
        ("--prepared-only", "--execute"), ("--show-keys", "--report", "/tmp/x.html"), ("--replica", "/tmp/y"),
    ],
)  # fmt: skip
def test_flags_that_do_not_apply_are_refused(run: Run, log_dir: Path, more: tuple[str, ...]) -> None:
    before = snapshot(log_dir)
    result = run(*flags(log_dir, *more))
    assert result.exit_code == 2
    assert "conflicting-flags" in result.stderr
    assert more[0] in result.stderr
    assert snapshot(log_dir) == before


@pytest.mark.parametrize(
    "more", [("--compression", "lz4"), ("--batch-bytes", "0"), ("--replicas-in-sync",), ("--forget-producers",)]
)
def test_flags_of_a_repack_require_it(run: Run, log_dir: Path, more: tuple[str, ...]) -> None:
    result = run("compact", "--log-dirs", log_dir, *KNOWN, *more)
    assert result.exit_code == 2
    assert "missing-flag" in result.stderr


def _of_producer(count: int, age_ms: int) -> bytes:
    """Return batches of one record of an idempotent producer, which are that old."""
    timestamp = int(time.time() * 1000) - age_ms
    return b"".join(
        encode_batch([Rec(n, timestamp, b"k", b"v" * 20)], producer_id=5, producer_epoch=0, base_sequence=n)
        for n in range(count)
    )


@pytest.fixture
def idempotent(tmp_path: Path) -> Path:
    """A log dir with a partition of one idempotent producer: ten batches of two days ago, and an active segment."""
    log_dir = tmp_path / "idempotent"
    last = Rec(10, 0, b"k", b"v")
    write_log_dir(log_dir, {"orders-0": [last]}, segments=1)
    shutil.rmtree(log_dir / "orders-0")
    (log_dir / "orders-0").mkdir()
    for base, data in ((0, _of_producer(10, 2 * 86_400_000)), (10, encode_batch([last]))):
        for suffix, content in ((".log", data), (".index", b""), (".timeindex", b"")):
            (log_dir / "orders-0" / f"{base:020d}{suffix}").write_bytes(content)
    return log_dir


PRODUCERS = ("--topic-config", "producer.id.expiration.ms=86400000")
TRANSACTIONS = ("--topic-config", "transactional.id.expiration.ms=86400000")
LATER = ("--topic-config", "producer.id.expiration.ms=259200000")


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ((), "clean"),
        (("--forget-producers", *PRODUCERS), "repacked"),
        (("--forget-producers", *LATER), "clean"),
        (("--forget-producers", *TRANSACTIONS), "refused"),
    ],
)
@pytest.mark.parametrize("mode", ["KRaft", "ZooKeeper"])
def test_producers_that_have_expired_are_forgotten_on_request(
    run: Run, idempotent: Path, mode: str, more: tuple[str, ...], status: str
) -> None:
    """With ZooKeeper, the broker may be of a version with only one of both settings, so both must be known."""
    if mode == "ZooKeeper":
        (idempotent / "meta.properties").write_text("version=0\nbroker.id=1\ncluster.id=a2V5dGFpbC10ZXN0cy0xMjM\n")
        status = "refused" if more else status
    result = run(*flags(idempotent, "--execute", *more))
    row = rows_of(result)["orders-0"]
    assert row["status"] == status, row
    if status == "refused":
        assert row["slugs"] == ["unknown-topic-settings"]
        assert "it is unknown which producers have expired" in row["error"]
    made = decode_log((idempotent / "orders-0" / f"{0:020d}.log").read_bytes())[0]
    assert (made.record_count, made.producer_id) == ((10, -1) if status == "repacked" else (1, 5))


def test_with_zookeeper_the_longer_time_counts(run: Run, idempotent: Path) -> None:
    (idempotent / "meta.properties").write_text("version=0\nbroker.id=1\ncluster.id=a2V5dGFpbC10ZXN0cy0xMjM\n")
    for name, status in (("259200000", "clean"), ("86400000", "repacked")):
        more = ("--topic-config", f"transactional.id.expiration.ms={name}")
        row = rows_of(run(*flags(idempotent, "--execute", "--forget-producers", *PRODUCERS, *more)))["orders-0"]
        assert row["status"] == status, row


def test_values_that_the_metadata_log_may_override_are_not_known(run: Run, idempotent: Path, tmp_path: Path) -> None:
    """With KRaft, brokers' dynamic settings override the file. In ZooKeeper, they are never read."""
    config = tmp_path / "server.properties"
    config.write_text("producer.id.expiration.ms=86400000\nunclean.leader.election.enable=false\n")
    row = rows_of(run(*flags(idempotent, "--execute", "--forget-producers", "--config", config)))["orders-0"]
    assert row["status"] == "refused" and row["slugs"] == ["unknown-topic-settings"], row
    assert "producer.id.expiration.ms may be set for all brokers in the metadata log" in row["error"]
    (idempotent / "meta.properties").write_text("version=0\nbroker.id=1\ncluster.id=a2V5dGFpbC10ZXN0cy0xMjM\n")
    row = rows_of(run(*flags(idempotent, "--execute", "--forget-producers", "--config", config)))["orders-0"]
    assert row["status"] == "refused" and row["slugs"] == ["unknown-topic-settings"], row
    assert "producer.id.expiration.ms may be set for all brokers in ZooKeeper, which is not read" in row["error"]
    given = ("--log-dirs", idempotent, "--config", config, "--topics-have-no-overrides", "--replicas-in-sync")
    row = rows_of(run("compact", *given, "--repack", "--output", "json"))["orders-0"]
    assert "unclean.leader.election.enable of orders may be set for all brokers in ZooKeeper" in row["error"]
    (idempotent / "meta.properties").write_text("version=1\nnode.id=1\ncluster.id=a2V5dGFpbC10ZXN0cy0xMjM\n")
    row = rows_of(run("compact", *given, "--repack", "--output", "json"))["orders-0"]
    assert "unclean.leader.election.enable of orders may be set for all brokers in the metadata log" in row["error"]


def test_producers_are_forgotten_by_the_clock_of_a_broker(run: Run, idempotent: Path) -> None:
    result = run(*flags(idempotent, "--forget-producers", "--now", "1900000000000", "--unsafe-clock", "--execute"))
    assert result.exit_code == 2
    assert "brokers forget producers by their own clock" in result.stderr


def test_without_merging_no_producer_is_forgotten(run: Run, log_dir: Path) -> None:
    result = run(*flags(log_dir, "--forget-producers", "--batch-bytes", "0"))
    assert result.exit_code == 2
    assert "only merged batches lose their producers" in result.stderr


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (("--compression", "brotli"), "unknown codec 'brotli'"),
        (("--compression", "gzip:10"), "gzip has levels 1 to 9"),
        (("--compression", "snappy:1"), "snappy has no levels"),
        (("--compression", "zstd:"), "is not a whole number"),
        (("--batch-bytes", "33m"), "Use at most 32m"),
    ],
)
def test_invalid_values_are_refused(run: Run, log_dir: Path, more: tuple[str, ...], text: str) -> None:
    result = run(*flags(log_dir, *more))
    assert result.exit_code == 2
    assert text in " ".join(result.stderr.replace("│", " ").split())


def refusal(run: Run, log_dir: Path, *given: str | Path) -> str:
    before = snapshot(log_dir)
    result = run("compact", "--log-dirs", log_dir, "--repack", "--execute", "--output", "json", *given)
    rows = rows_of(result)
    assert result.exit_code == 1
    assert {row["status"] for row in rows.values()} == {"refused"}
    assert snapshot(log_dir) == before
    return str(rows["orders-0"]["error"])


def test_an_unknown_limit_of_batches_is_refused(run: Run, log_dir: Path) -> None:
    text = refusal(run, log_dir, "--topics-have-no-overrides", "--replicas-in-sync", *UNCLEAN)
    assert "max.message.bytes of orders is the broker's" in text
    assert "[unknown-topic-settings]" in text
    text = refusal(run, log_dir, "--topics-have-no-overrides", "--replicas-in-sync", *MAX)
    assert "unclean.leader.election.enable of orders is the broker's" in text
    assert "[unknown-topic-settings]" in refusal(run, log_dir, *MAX, "--replicas-in-sync")


def test_the_brokers_file_makes_the_limit_known(run: Run, log_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "server.properties"
    file.write_text(f"node.id=1\nlog.dirs={log_dir}\nmessage.max.bytes=400\n")
    result = run("compact", "--config", file, "--topics-have-no-overrides", *UNCLEAN, "--repack", "--replicas-in-sync",
                 "--execute", "--output", "json")  # fmt: skip
    assert result.exit_code == 0, result.stderr
    largest = max(b.size for log in (log_dir / "orders-0").glob("*0.log") for b in decode_log(log.read_bytes())[1:])
    assert largest <= 400


def test_unknown_replicas_are_refused_unless_nothing_is_merged(run: Run, log_dir: Path) -> None:
    text = refusal(run, log_dir, *KNOWN)
    assert "it is unknown whether followers are in sync" in text
    assert "[replicas-unknown]" in text
    result = run("compact", "--log-dirs", log_dir, "--repack", *KNOWN, "--batch-bytes", "0", "--output", "json")
    assert {row["status"] for row in rows_of(result).values()} == {"would-repack"}


def test_unclean_leader_elections_are_refused_unless_nothing_is_merged(run: Run, log_dir: Path) -> None:
    given = ("--topics-have-no-overrides", *MAX, "--topic-config", "unclean.leader.election.enable=true")
    text = refusal(run, log_dir, *given, "--replicas-in-sync")
    assert "could truncate its log inside a merged batch" in text
    assert "[unclean-leader-election]" in text
    result = run("compact", "--log-dirs", log_dir, "--repack", *given, "--batch-bytes", "0", "--output", "json")
    assert {row["status"] for row in rows_of(result).values()} == {"would-repack"}


def test_tiered_topics_are_refused(run: Run, log_dir: Path) -> None:
    text = refusal(run, log_dir, *KNOWN, "--replicas-in-sync", "--topic-config", "remote.storage.enable=true")
    assert "[tiered-topic]" in text


def _with_replicas(log_dir: Path, *records: bytes, uncommitted: bytes | None = None) -> None:
    """Write a metadata log in which both topics have partitions on brokers 1 and 2, and then these records; the last
    one may be uncommitted."""
    topics = [model.topic("orders", 1), model.topic("users", 2)]
    partitions = [model.partition(1, 0, (1, 2)), model.partition(1, 1, (1,)), model.partition(2, 0, (2, 1))]
    log = model.MetadataLog(log_dir / "__cluster_metadata-0").append(*topics, *partitions)
    log.append(*records).no_ops(1100)
    if uncommitted is not None:
        log.append(uncommitted)
    for name, number in (("orders-0", 1), ("orders-1", 1), ("users-0", 2)):
        topic_id = base64.urlsafe_b64encode(model.topic_uuid(number)).rstrip(b"=").decode()
        (log_dir / name / "partition.metadata").write_text(f"version: 0\ntopic_id: {topic_id}")


def test_the_metadata_log_shows_which_followers_are_in_sync(run: Run, log_dir: Path) -> None:
    """The stopped broker itself need not be in sync."""
    _with_replicas(log_dir, model.change(1, 0, in_sync=(1,)), model.change(2, 0, in_sync=(2,)))
    result = run("compact", "--log-dirs", log_dir, *MAX, *UNCLEAN, "--repack", "--execute", "--output", "json",
                 "--metadata-is-current")  # fmt: skip
    rows = rows_of(result)
    assert {name: row["status"] for name, row in rows.items()} == {
        "orders-0": "refused", "orders-1": "repacked", "users-0": "repacked",
    }  # fmt: skip
    assert "not certainly in sync: 2 (metadata log at offset" in rows["orders-0"]["error"]
    assert "[replicas-not-in-sync]" in rows["orders-0"]["error"]
    assert result.exit_code == 3


def test_a_replica_whose_removal_may_be_uncommitted_must_be_in_sync(run: Run, log_dir: Path) -> None:
    _with_replicas(log_dir, model.change(1, 0, in_sync=(1,)), uncommitted=model.change(1, 0, (1,)))
    result = run("compact", "--log-dirs", log_dir, *MAX, *UNCLEAN, "--repack", "--output", "json",
                 "--metadata-is-current")  # fmt: skip
    assert "not certainly in sync: 2 (metadata log at offset" in rows_of(result)["orders-0"]["error"]


def test_the_high_watermark_ends_the_section(run: Run, tmp_path: Path) -> None:
    log_dir = write_log_dir(tmp_path / "logs", {"orders-0": random_records(1, 400)})
    (log_dir / "replication-offset-checkpoint").write_text("0\n1\norders 0 250\n")
    run(*flags(log_dir, "--execute"))
    assert batches(log_dir / "orders-0") == [1, 1, 10, 10]


def test_a_prepared_partition_is_refused(run: Run, log_dir: Path) -> None:
    policy = ("--topic-config", "orders:cleanup.policy=compact", "--topic-config", "users:cleanup.policy=compact")
    done = run("compact", "--log-dirs", log_dir, *KNOWN, *policy, "--force", "--prepare")
    assert done.exit_code == 0, done.stderr
    assert "[partition-is-prepared]" in refusal(run, log_dir, *KNOWN, "--replicas-in-sync")


def test_leftovers_of_a_killed_run_are_resolved_first(run: Run, log_dir: Path) -> None:
    for name in ("orders-0", "users-0"):
        (log_dir / name / f"{100:020d}.log.rdead.as1.clean").write_bytes(b"garbage")
    result = run(*flags(log_dir, "--execute"))
    assert {row["status"] for row in rows_of(result).values()} == {"repacked"}
    assert not list(log_dir.rglob("*.clean"))


def test_a_wrong_output_is_not_committed(run: Run, log_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof reads what is on the disk."""
    real = repacking.prove_repack

    def prove(fs: FileSystem, spec: repacking.RepackSpec) -> repacking.RepackReport:
        [*outputs] = [file for group in spec.groups for out in group.segments for file in out.files]
        path = Path(spec.scratch_path, outputs[0].name)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        return real(fs, spec)

    monkeypatch.setattr(repacking, "prove_repack", prove)
    before = snapshot(log_dir)
    result = run(*flags(log_dir, "--execute"))
    rows = rows_of(result)
    assert {row["status"] for row in rows.values()} == {"failed"}
    assert result.exit_code == 1
    assert "Nothing was replaced" in rows["orders-0"]["error"]
    assert snapshot(log_dir) == before
