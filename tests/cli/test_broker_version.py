"""The effect of `--broker-version` on the commands: without Spark, with Spark, and out of place."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from keytail.cli.configuration import read_configuration
from keytail.config.broker_version import parse_broker_version
from keytail.config.producer_expiration import NEVER_MS
from tests.command_line import Run, rows_of
from tests.no_spark import without_spark
from tests.reference.batches import Batch, Rec, decode_log, encode_batch, encode_marker
from tests.reference.indexing import index_files

NOW_MS = time.time_ns() // 10**6
CONFIG = ("--topics-have-no-overrides", "--topic-config", "t:cleanup.policy=compact", "--force")
RETENTION = ("--topic-config", "t:delete.retention.ms=0")
NOTE = "tombstones and transaction markers are removed based on the times of their files"
HORIZON = 0x40


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Write a log dir with the partition t-0: two old files and a new one, each with a value, a tombstone, and a marker
    of a transaction without data. All files but the last are clean.
    """
    path = tmp_path / "logs"
    (path / "t-0").mkdir(parents=True)
    for number, age_ms in enumerate((10**6, 10**6 - 500, 0)):
        at = 3 * number
        records = [Rec(at, NOW_MS - 10**7, b"v%d" % number, b"1"), Rec(at + 1, NOW_MS - 10**7, b"t%d" % number, None)]
        marker = encode_marker(at + 2, NOW_MS - 10**7, commit=True, producer_id=number, producer_epoch=0)
        _write(path / "t-0", at, encode_batch(records) + marker, NOW_MS - 10**4 - age_ms)
    _write(path / "t-0", 9, b"", NOW_MS)
    (path / ".kafka_cleanshutdown").touch()
    for name, offset in (("recovery-point", 9), ("replication", 9), ("cleaner", 6)):
        (path / f"{name}-offset-checkpoint").write_text(f"0\n1\nt 0 {offset}\n")
    return path


def _write(partition: Path, base: int, log: bytes, mtime_ms: int) -> None:
    stem = partition / f"{base:020d}"
    for suffix, data in zip((".log", ".index", ".timeindex"), (log, *index_files(log, base, 4096)), strict=True):
        stem.with_suffix(suffix).write_bytes(data)
        os.utime(stem.with_suffix(suffix), ns=(mtime_ms * 10**6, mtime_ms * 10**6))


def left(partition: Path) -> list[Batch]:
    return [batch for path in sorted(partition.glob("*.log")) for batch in decode_log(path.read_bytes())]


def offsets(partition: Path) -> list[int]:
    return [record.offset for batch in left(partition) for record in batch.records]


@pytest.mark.parametrize(
    ("version", "retention_ms", "retained"),
    [
        (None, 0, list(range(9))),
        ("3.1", 0, list(range(9))),
        ("2.8.2", 501, list(range(9))),  # the last clean file is 500 ms newer than the first
        ("3.0", 500, [0, 3, 4, 5, 6, 7, 8]),
        ("0.11", 0, [0, 3, 6, 7, 8]),
    ],
)
def test_before_kafka_3_1_file_times_are_used_and_no_horizon_is_written(
    run: Run, logs: Path, version: str | None, retention_ms: int, retained: list[int]
) -> None:
    by_file_time = version not in (None, "3.1")
    more = ["--topic-config", f"t:delete.retention.ms={retention_ms}"]
    more += [] if version is None else ["--broker-version", version]
    with without_spark():
        plan = run("plan", "--log-dirs", logs, *CONFIG, *more)
        done = run("compact", "--log-dirs", logs, *CONFIG, "--execute", "--output", "json", *more)
    assert rows_of(done)["t-0"]["status"] == "compacted"
    assert (NOTE in plan.stderr, NOTE in done.stderr) == (by_file_time, by_file_time)
    assert offsets(logs / "t-0") == retained
    has_horizon = {bool(batch.attributes & HORIZON) for batch in left(logs / "t-0")}
    assert has_horizon == ({False} if by_file_time else {True})
    if by_file_time:
        removed = 9 - len(retained)
        row = rows_of(done)["t-0"]
        assert (row["tombstones_removed"], row["markers_removed"]) == (removed // 2, removed // 2)


@pytest.mark.spark
@pytest.mark.usefixtures("on_spark")
def test_the_result_is_the_same_with_spark_and_fan_out(run: Run, logs: Path) -> None:
    more = ("--broker-version", "2.8", *RETENTION, "--fan-out", "always")
    done = run("compact", "--log-dirs", logs, *CONFIG, "--execute", "--output", "json", "--master", "local[2]", *more)
    assert rows_of(done)["t-0"]["status"] == "compacted", done.stdout
    assert offsets(logs / "t-0") == [0, 3, 6, 7, 8]
    assert not any(batch.attributes & HORIZON for batch in left(logs / "t-0"))


def test_the_result_is_the_same_out_of_place(run: Run, logs: Path, tmp_path: Path) -> None:
    more = ("--broker-version", "2.8", *RETENTION, "--output-dir", tmp_path / "out")
    with without_spark():
        done = run("compact", "--log-dirs", logs, *CONFIG, "--execute", "--output", "json", *more)
    assert NOTE in done.stderr
    assert offsets(logs / "t-0") == list(range(9))
    assert offsets(tmp_path / "out" / "t-0") == [0, 3, 6, 7, 8]


def test_the_report_shows_the_version_and_no_horizons(run: Run, logs: Path, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    page = tmp_path / "run.html"
    with without_spark():
        run("compact", "--log-dirs", logs, *CONFIG, "--execute", "--broker-version", "2.8.2", "--report", page)
    assert "--broker-version" in page.read_text() and "2.8.2" in page.read_text()


@pytest.mark.parametrize(
    ("version", "given", "expiration_ms"),
    [
        (None, (), NEVER_MS),
        ("3.4", ("transactional.id.expiration.ms=5",), NEVER_MS),
        ("3.4", ("producer.id.expiration.ms=7",), 7),
        ("2.8", (), NEVER_MS),
        ("3.3", ("transactional.id.expiration.ms=5",), 5),
        ("2.8", ("transactional.id.expiration.ms=5", "producer.id.expiration.ms=7"), 7),
    ],
)
def test_before_kafka_3_4_producers_expire_with_transactional_ids(
    version: str | None, given: tuple[str, ...], expiration_ms: int
) -> None:
    """Producer expiration determines whether a producer's last batch is retained after it was emptied."""
    stated = parse_broker_version(version) if version else None
    configuration = replace(read_configuration(None, given, True), broker_version=stated)
    assert configuration.for_compaction("t")[1].producer_id_expiration_ms == expiration_ms


@pytest.mark.parametrize("text", ["0.10.2", "2", "new"])
def test_an_invalid_broker_version_is_a_usage_error(run: Run, logs: Path, text: str) -> None:
    done = run("compact", "--log-dirs", logs, *CONFIG, "--broker-version", text)
    assert done.exit_code == 2
    assert "use a version from 0.11 on" in " ".join(done.stderr.replace("│", " ").split())
