"""The format that is chosen for messages of magic 0 and 1, by settings or by the flag; an unknown format is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.command_line import Run, rows_of
from tests.log_dirs import BASE_MS, snapshot
from tests.no_spark import without_spark
from tests.reference.batches import Rec, encode_batch
from tests.reference.codecs import GZIP, LZ4, SNAPPY
from tests.reference.indexing import index_files
from tests.reference.legacy import decode_any_log, encode_single, encode_wrapper

ZOOKEEPER, KRAFT = "version=0\nbroker.id=1\n", "version=1\nnode.id=1\ncluster.id=a2V5dGFpbC10ZXN0cy0xMjM\n"
CONFIG = ("--topics-have-no-overrides", "--topic-config", "old:cleanup.policy=compact", "--force")


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Write a log dir after a clean shutdown: a partition has messages of all magics, and no file names the broker."""
    path = tmp_path / "logs"
    (path / "old-0").mkdir(parents=True)
    for base, log in ((0, _log(0)), (100, _log(100)), (200, b"")):
        stem = path / "old-0" / f"{base:020d}"
        for suffix, data in zip((".log", ".index", ".timeindex"), (log, *index_files(log, base, 4096)), strict=True):
            stem.with_suffix(suffix).write_bytes(data)
    (path / ".kafka_cleanshutdown").touch()
    text = "0\n1\nold 0 200\n"
    (path / "recovery-point-offset-checkpoint").write_text(text)
    (path / "replication-offset-checkpoint").write_text(text)
    return path


def _log(base: int) -> bytes:
    """Return messages of magic 0 and 1, single and compressed, and a batch of version 2, with recurring keys."""
    keys = [b"k%d" % (base + i if i % 10 == 3 else i % 17) for i in range(90)]
    records = [Rec(base + i, BASE_MS + base + i, key, b"v%d" % (base + i)) for i, key in enumerate(keys)]
    timeless = [replace(record, timestamp=-1) for record in records]
    parts = [encode_single(record, magic=1) for record in records[:10]]
    parts += [encode_wrapper(records[at : at + 10], codec) for at, codec in ((10, GZIP), (20, SNAPPY), (30, LZ4))]
    parts += [encode_single(record, magic=0) for record in timeless[40:50]]
    parts += [encode_wrapper(timeless[at : at + 10], codec, magic=0) for at, codec in ((50, GZIP), (60, LZ4))]
    return b"".join(parts) + encode_batch(records[70:75]) + encode_wrapper(records[75:], GZIP, append_time=BASE_MS)


def magics(logs: Path) -> list[int]:
    return [data[b.position + 16] for path in sorted((logs / "old-0").glob("*.log"))
            for data in [path.read_bytes()] for b in decode_any_log(data)]  # fmt: skip


def latest(logs: Path) -> dict[bytes | None, Rec]:
    records = [
        record
        for path in sorted((logs / "old-0").glob("*.log"))
        for batch in decode_any_log(path.read_bytes())
        for record in batch.records
    ]
    return {record.key: record for record in records}


def compact(run: Run, logs: Path, *more: str | Path) -> tuple[str, str, str]:
    """Return status and error of the partition, and standard error of the run."""
    with without_spark():
        done = run("compact", "--log-dirs", logs, *CONFIG, "--execute", "--output", "json", *more)
    row = rows_of(done)["old-0"]
    return row["status"], row["error"] or "", done.stderr


def test_an_unknown_format_is_refused_and_nothing_is_changed(run: Run, logs: Path) -> None:
    before = snapshot(logs / "old-0")
    status, error, message = compact(run, logs)
    assert status == "refused"
    assert "--message-format keep" in error and "byte position" in error
    assert "the message format is unknown (topics: 1)" in message
    assert snapshot(logs / "old-0") == before


@pytest.mark.parametrize(
    ("meta", "more"),
    [
        ("", ("--message-format", "keep")),
        (KRAFT, ("--message-format", "keep")),
        (ZOOKEEPER, ()),
        ("", None),
        ("", ("--topic-config", "old:message.format.version=0.10.2")),
        (ZOOKEEPER, ("--topic-config", "old:message.format.version=0.9.0")),
    ],
)
def test_the_magic_is_preserved(run: Run, logs: Path, meta: str, more: tuple[str, ...] | None) -> None:
    if meta:
        (logs / "meta.properties").write_text(meta)
    if more is None:  # the broker's file has the settings, and there is no meta.properties
        config = logs.parent / "server.properties"
        config.write_text("broker.id=1\ninter.broker.protocol.version=2.8\nlog.message.format.version=0.10.2\n")
        more = ("--config", str(config))
    before, newest = set(magics(logs)), latest(logs)
    assert before == {0, 1, 2}
    planned = run("plan", "--log-dirs", logs, *CONFIG, *more)
    assert "messages of magic 0 and 1 keep their magic (topics: 1)" in planned.stderr
    status, error, message = compact(run, logs, *more)
    assert (status, error) == ("compacted", "")
    assert "messages of magic 0 and 1 keep their magic (topics: 1)" in message
    assert set(magics(logs)) == before
    left = latest(logs)
    assert {key for key, record in newest.items() if record.value is not None} <= left.keys()
    assert all(left[key] == newest[key] for key in left)


@pytest.mark.parametrize(
    ("meta", "more"),
    [
        (KRAFT, ()),
        (ZOOKEEPER, ("--message-format", "v2")),
        ("", ("--topic-config", "old:message.format.version=2.8")),
        (KRAFT, ("--topic-config", "old:message.format.version=0.10.2")),
    ],
)
def test_version_2_is_written(run: Run, logs: Path, meta: str, more: tuple[str, ...]) -> None:
    if meta:
        (logs / "meta.properties").write_text(meta)
    status, error, message = compact(run, logs, *more)
    assert (status, error) == ("compacted", "")
    assert "magic 0 and 1" not in message
    assert set(magics(logs)) == {2}


def test_the_output_out_of_place_equals_that_in_place(run: Run, logs: Path, tmp_path: Path) -> None:
    (logs / "meta.properties").write_text(ZOOKEEPER)
    before = snapshot(logs / "old-0")
    status, error, message = compact(run, logs, "--output-dir", tmp_path / "out", "--high-watermark", "log-end")
    assert (status, error) == ("compacted", "")
    assert "keep their magic" in message
    assert snapshot(logs / "old-0") == before
    assert compact(run, logs)[0] == "compacted"
    contents = [[p.read_bytes() for p in sorted((home / "old-0").glob("*.log"))] for home in (logs, tmp_path / "out")]
    assert contents[0] == contents[1] and set(magics(logs)) == {0, 1, 2}


def test_the_compacted_log_has_correct_indexes_and_no_errors(run: Run, logs: Path) -> None:
    """The index files of the compacted log equal rebuilt ones, and `verify` reports no errors before or after that."""
    (logs / "meta.properties").write_text(ZOOKEEPER)
    found = []
    for _ in range(2):
        run("rebuild-index", "--log-dirs", logs, "--all", "--execute")
        rows = rows_of(run("verify", "--log-dirs", logs, "--output", "json"))
        found.append(sorted((f["severity"], f["what"]) for f in rows["old-0"]["findings"] if f["severity"] == "error"))
        if len(found) == 1:
            assert compact(run, logs)[0] == "compacted"
            before = {path.name: path.read_bytes() for path in (logs / "old-0").glob("*index")}
    assert found == [[], []]
    assert {path.name: path.read_bytes() for path in (logs / "old-0").glob("*index")} == before
    for command in (
        ("dump", *sorted(map(str, (logs / "old-0").glob("*.log")))),
        ("describe", "--log-dirs", logs, *CONFIG[:3]),
    ):
        done = run(*command)
        assert done.exit_code == 0, done.output
