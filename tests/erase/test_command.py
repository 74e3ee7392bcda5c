"""`keytail erase` through the command line: its rows, the files that it changes, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from keytail.erase import backups
from keytail.erase.other_directories import OtherDirectories
from keytail.format.names import PartitionDir
from keytail.format.producers import ProducerEntry, encode_snapshot
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.lock import hold
from tests.command_line import Run, rows_of
from tests.log_dirs import BASE_MS, records_of, snapshot
from tests.reference.batches import Rec, decode_log, encode_batch, encode_marker
from tests.reference.indexing import index_files

KNOWN = ("--topics-have-no-overrides",)
KEYS = [b"key-3", b"key-17"]


@pytest.fixture
def closed(log_dir: Path) -> Path:
    """Return the log dir with the files that a broker leaves at a log end when it stops."""
    for partition in log_dir.glob("*-0"), log_dir.glob("*-1"):
        for path in partition:
            (path / f"{400:020d}.snapshot").write_bytes(encode_snapshot([]))
            close_active(path)
    return log_dir


def close_active(partition: Path) -> None:
    """Write the indexes of the active segment as a broker leaves them when it stops."""
    log = max(partition.glob("*.log"))
    index, times = index_files(log.read_bytes(), int(log.stem), 4096)
    log.with_suffix(".index").write_bytes(index)
    log.with_suffix(".timeindex").write_bytes(times)


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_bytes(b"\n".join([*KEYS, b"in no record"]) + b"\n")
    return path


def erase(
    run: Run, log_dir: Path, keys_file: Path, *more: str | Path, known: bool = True
) -> tuple[int, dict[str, Any]]:
    flags = ("--log-dirs", log_dir, "--keys-file", keys_file, "--output", "json", *(KNOWN if known else ()))
    result = run("erase", *flags, *more)
    return result.exit_code, rows_of(result)


def without(records: list[Rec]) -> list[Rec]:
    return [record for record in records if record.key not in KEYS]


def test_a_dry_run_counts_and_changes_nothing(run: Run, closed: Path, keys_file: Path) -> None:
    before = snapshot(closed)
    status, rows = erase(run, closed, keys_file, "--topic", "orders")
    assert status == 0 and set(rows) == {"orders-0", "orders-1"}
    row, records = rows["orders-0"], records_of(closed / "orders-0")
    assert row["status"] == "would-erase" and row["active_segment"] == "would-roll"
    assert row["keys_found"] == 2
    assert row["records_erased"] == len(records) - len(without(records))
    assert (row["records_before"], row["records_after"]) == (400, len(without(records)))
    assert (row["segments_rewritten"], row["segments_before"], row["segments_after"]) == (4, 4, None)
    assert row["replicas"] is None
    assert snapshot(closed) == before


def test_all_records_of_the_keys_go_and_a_second_run_changes_nothing(run: Run, closed: Path, keys_file: Path) -> None:
    before = snapshot(closed)
    records = {path.name: records_of(path) for path in closed.glob("*-?")}
    status, rows = erase(run, closed, keys_file, "--topic", "orders", "--execute")
    assert status == 0, rows
    for name, row in rows.items():
        assert (row["status"], row["active_segment"], row["error"]) == ("erased", "rolled", "")
        assert records_of(closed / name) == without(records[name])
        assert sorted(int(path.stem) for path in (closed / name).glob("*.log")) == [0, 100, 200, 300, 400]
        sizes = [path.stat().st_size for path in (closed / name).glob("*.log")]
        assert (row["segments_after"], row["bytes_after"]) == (5, sum(sizes))
        for log in (closed / name).glob("*.log"):  # offsets of batches are unchanged
            old = before.get(f"{name}/{log.name}", (b"", 0))[0]
            pairs = [[(b.base_offset, b.last_offset) for b in decode_log(data)] for data in (log.read_bytes(), old)]
            assert pairs[0] == pairs[1]
            assert not old or log.stat().st_mtime_ns // 10**6 == before[f"{name}/{log.name}"][1] // 10**6
    after = snapshot(closed)
    unchanged = [name for name in before if name.startswith("users") or "checkpoint" in name or "snapshot" in name]
    assert all(after[name] == before[name] for name in unchanged)
    for path in closed.rglob("*"):
        if path.is_file():
            assert not any(key in path.read_bytes() for key in KEYS) or "users" in str(path)
    assert run("verify", "--log-dirs", closed).exit_code == 0
    status, rows = erase(run, closed, keys_file, "--topic", "orders", "--execute")
    assert status == 0 and {row["status"] for row in rows.values()} == {"absent"}
    assert snapshot(closed) == after


def test_the_table_has_totals_and_no_key(run: Run, closed: Path, keys_file: Path) -> None:
    result = run("erase", "--log-dirs", closed, "--keys-file", keys_file, *KNOWN, "--topic", "orders")
    assert "To erase: 73 records, of 2 keys." in result.stdout, result.stdout
    assert "This was a dry run" in result.output
    result = run("erase", "--log-dirs", closed, "--keys-file", keys_file, *KNOWN, "--topic", "orders", "--execute")
    assert "Erased: 73 records, of 2 keys." in result.stdout
    assert "key-3" not in result.output and "key-17" not in result.output


def test_a_segment_without_such_a_record_is_not_rewritten(run: Run, closed: Path, keys_file: Path) -> None:
    log = closed / "orders-0" / f"{100:020d}.log"
    batches = decode_log(log.read_bytes())
    fields = [{"base_offset": batch.base_offset, "last_offset": batch.last_offset} for batch in batches]
    log.write_bytes(b"".join(encode_batch(without(b.records), **f) for b, f in zip(batches, fields, strict=True)))
    before = (log.stat().st_ino, log.read_bytes())
    _, rows = erase(run, closed, keys_file, "--partitions", "orders-0", "--execute")
    assert rows["orders-0"]["status"] == "erased" and rows["orders-0"]["segments_rewritten"] == 3
    assert (log.stat().st_ino, log.read_bytes()) == before


def test_segments_are_rewritten_in_passes_if_space_is_short(
    run: Run, closed: Path, keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileSystem, "free_bytes", lambda self, path: 5000)
    records = records_of(closed / "orders-0")
    _, rows = erase(run, closed, keys_file, "--partitions", "orders-0", "--execute")
    assert rows["orders-0"]["status"] == "erased", rows
    assert records_of(closed / "orders-0") == without(records)


def refused(run: Run, log_dir: Path, keys_file: Path, *more: str | Path, **known: bool) -> str:
    """Return the reason of orders-0, which is refused; nothing was changed."""
    before = snapshot(log_dir)
    status, rows = erase(run, log_dir, keys_file, "--partitions", "orders-0", *more, **known)
    assert status == 1
    assert rows["orders-0"]["status"] == "refused", rows["orders-0"]
    assert rows["orders-0"]["records_erased"] is None
    assert snapshot(log_dir) == before
    return rows["orders-0"]["error"]


def test_unknown_settings_and_tiered_topics_are_refused(run: Run, closed: Path, keys_file: Path) -> None:
    assert "Unknown settings of orders: remote.storage.enable" in refused(run, closed, keys_file, known=False)
    flags = ("--topic-config", "remote.storage.enable=true", "--execute")
    assert "tiered topic" in refused(run, closed, keys_file, *flags)


def test_an_open_transaction_with_such_a_record_is_refused(run: Run, closed: Path, keys_file: Path) -> None:
    log = closed / "orders-0" / f"{300:020d}.log"
    fields = {"producer_id": 7, "producer_epoch": 0}
    data = encode_batch([Rec(400, BASE_MS, KEYS[0], b"v")], transactional=True, base_sequence=0, **fields)
    whole = log.read_bytes()
    log.write_bytes(whole + data)
    assert "producer 7 has an open transaction" in refused(run, closed, keys_file)
    assert "producer 7 has an open transaction" in refused(run, closed, keys_file, "--execute")
    log.write_bytes(whole + data + encode_marker(401, BASE_MS, commit=True, **fields))
    (closed / "orders-0" / f"{402:020d}.snapshot").write_bytes(encode_snapshot([]))
    close_active(closed / "orders-0")
    _, rows = erase(run, closed, keys_file, "--partitions", "orders-0", "--execute")
    assert rows["orders-0"]["status"] == "erased", rows


def test_a_producer_of_the_snapshot_keeps_its_time_however_old(run: Run, closed: Path, keys_file: Path) -> None:
    """The expiration of producers is not known here, and may be longer than Kafka's default."""
    partition, recent_ms = closed / "orders-0", time.time_ns() // 1_000_000 - 5 * 86_400_000
    log = partition / f"{300:020d}.log"
    data = encode_batch([Rec(400, recent_ms, KEYS[0], b"v")], producer_id=7, producer_epoch=0, base_sequence=0)
    log.write_bytes(log.read_bytes() + data)
    entry = ProducerEntry(7, 0, 0, 400, 0, recent_ms, -1, -1)
    (partition / f"{401:020d}.snapshot").write_bytes(encode_snapshot([entry]))
    close_active(partition)
    _, rows = erase(run, closed, keys_file, "--partitions", "orders-0", "--execute")
    assert rows["orders-0"]["status"] == "erased", rows
    last = decode_log(log.read_bytes())[-1]
    assert (last.producer_id, last.records, last.max_timestamp) == (7, (), recent_ms)


def test_an_unclean_shutdown_is_refused(run: Run, closed: Path, keys_file: Path) -> None:
    (closed / ".kafka_cleanshutdown").unlink()
    assert "was not stopped cleanly" in refused(run, closed, keys_file, "--execute")
    _, rows = erase(run, closed, keys_file, "--topic", "orders")
    assert rows["orders-0"]["status"] == "would-erase"


def test_an_active_segment_that_cannot_be_rolled_is_refused(run: Run, closed: Path, keys_file: Path) -> None:
    (closed / "orders-0" / f"{400:020d}.snapshot").unlink()
    error = refused(run, closed, keys_file, "--execute")
    assert "the active segment has records to be erased and must be rolled first" in error
    assert "The producer snapshot at the log end offset" in error


def test_files_with_other_names_are_refused(run: Run, closed: Path, keys_file: Path, tmp_path: Path) -> None:
    os.link(closed / "orders-0" / f"{0:020d}.log", tmp_path / "snapshot")
    assert "the file has 2 names (hard links)" in refused(run, closed, keys_file, "--execute")


def test_another_directory_of_the_partition_is_refused(run: Run, closed: Path, keys_file: Path) -> None:
    shutil.copytree(closed / "orders-0", closed / f"orders-0.{'0' * 32}-delete")
    assert "other directories may have records of the partition" in refused(run, closed, keys_file, "--execute")


def test_files_that_are_no_part_of_the_log_are_refused(run: Run, closed: Path, keys_file: Path) -> None:
    shutil.copy(closed / "orders-0" / f"{0:020d}.log", closed / "orders-0" / f"{0:020d}.log.bak")
    for more in ((), ("--execute",)):
        assert f"may have records to be erased: {0:020d}.log.bak" in refused(run, closed, keys_file, *more)


@pytest.mark.parametrize("kind", ["stray", "delete", "future"])
def test_a_directory_in_a_log_dir_that_only_the_file_of_the_broker_names_is_refused(
    run: Run, closed: Path, keys_file: Path, tmp_path: Path, kind: str
) -> None:
    other = tmp_path / "other"
    shutil.copytree(closed / "orders-0", other / f"orders-0.{'0' * 32}-{kind}")
    config = tmp_path / "server.properties"
    config.write_text(f"log.dirs={closed},{other},{tmp_path / 'missing'}\n")
    error = refused(run, closed, keys_file, "--execute", "--config", config)
    assert f"other directories may have records of the partition: {other}" in error


@pytest.mark.parametrize("kind", ["stray", "delete"])
def test_a_directory_without_its_partition_is_an_error(run: Run, closed: Path, keys_file: Path, kind: str) -> None:
    (closed / "orders-1").rename(closed / f"orders-1.{'0' * 32}-{kind}")
    before = snapshot(closed)
    for more in ((), ("--execute",)):
        done = run("erase", "--log-dirs", closed, *KNOWN, "--keys-file", keys_file, "--topic", "orders", *more)
        assert done.exit_code == 2
        assert "[other-directory-of-partition]" in done.stderr
    assert snapshot(closed) == before
    erase(run, closed, keys_file, "--partitions", "orders-0", "--execute")


def test_the_truncated_name_of_a_long_topic_is_that_of_its_partition() -> None:
    """A broker truncates the topic so that the name of a `-delete` directory has 255 characters."""
    suffix = f"-0.{'0' * 32}-delete"
    short = "t" * (255 - len(suffix))
    others = OtherDirectories(((f"/logs/{short}{suffix}", PartitionDir(short, 0, "delete")),))
    assert others.of(f"{short}tt", 0) and others.of(short, 0)
    assert not others.of(f"{short}tt", 1) and not others.of(f"u{short}", 0)


def test_a_prepared_compaction_is_refused(run: Run, closed: Path, keys_file: Path) -> None:
    flags = ("--log-dirs", closed, *KNOWN, "--topic-config", "orders:cleanup.policy=compact")
    done = run("compact", *flags, "--prepare", "--partitions", "orders-0")
    assert done.exit_code == 0, done.output
    assert "an earlier run prepared a compaction" in refused(run, closed, keys_file)
    assert "an earlier run prepared a compaction" in refused(run, closed, keys_file, "--execute")
    run("prepared", "--log-dirs", closed, "--discard", "--execute")
    _, rows = erase(run, closed, keys_file, "--partitions", "orders-0", "--execute")
    assert rows["orders-0"]["status"] == "erased"


def test_leftovers_of_interrupted_runs_are_removed_first(run: Run, closed: Path, keys_file: Path) -> None:
    left = closed / "orders-0" / f"{0:020d}.log.deleted"
    left.write_bytes((closed / "orders-0" / f"{0:020d}.log").read_bytes())
    _, rows = erase(run, closed, keys_file, "--partitions", "orders-0", "--execute")
    assert rows["orders-0"]["status"] == "erased"
    assert rows["orders-0"]["notes"] == [f"removed {left.name}"]
    assert not left.exists()


def test_internal_topics_are_refused(run: Run, closed: Path, keys_file: Path) -> None:
    (closed / "orders-0").rename(closed / "__consumer_offsets-0")
    _, rows = erase(run, closed, keys_file, "--topic", "__.*")
    assert "is an internal topic" in rows["__consumer_offsets-0"]["error"]


def test_a_byte_order_mark_is_refused(run: Run, closed: Path, keys_file: Path) -> None:
    keys_file.write_bytes(b"\xef\xbb\xbf" + keys_file.read_bytes())
    done = run("erase", "--log-dirs", closed, *KNOWN, "--keys-file", keys_file, "--topic", "orders")
    assert done.exit_code == 2 and "begins with a byte order mark" in done.stderr


def test_usage_errors(run: Run, closed: Path, keys_file: Path, tmp_path: Path) -> None:
    def fails(*flags: str | Path) -> str:
        result = run("erase", "--log-dirs", closed, *KNOWN, *flags)
        assert result.exit_code == 2
        return result.output

    assert "no topics are given" in fails("--keys-file", keys_file)
    assert "--keys-file cannot be read" in fails("--keys-file", tmp_path / "missing", "--topic", "orders")
    keys_file.write_bytes(b"secret\nsecret\n")
    text = fails("--keys-file", keys_file, "--topic", "orders")
    assert "has the same key as line 1" in text and "secret" not in text


def test_a_held_lock_is_refused(run: Run, closed: Path, keys_file: Path) -> None:
    before = snapshot(closed)
    with hold([str(closed)], LOCAL):
        result = run("erase", "--log-dirs", closed, *KNOWN, "--keys-file", keys_file, "--topic", "orders", "--execute")
    assert result.exit_code == 1 and "the log dir is in use" in result.output, result.output
    assert snapshot(closed) == before


@pytest.mark.parametrize("key_format", ["hex", "base64"])
def test_other_formats(run: Run, closed: Path, tmp_path: Path, key_format: str) -> None:
    import base64

    encode = {"hex": bytes.hex, "base64": lambda key: base64.b64encode(key).decode()}[key_format]
    path = tmp_path / "encoded"
    path.write_text("\n".join(map(encode, KEYS)))
    records = records_of(closed / "orders-0")
    erase(run, closed, path, "--partitions", "orders-0", "--execute", "--key-format", key_format)
    assert records_of(closed / "orders-0") == without(records)


def test_keys_of_a_schema_registry_are_erased(run: Run, closed: Path, tmp_path: Path) -> None:
    log = max((closed / "orders-0").glob("*.log"))
    keys = [b"\0\0\0\0" + bytes([number, 6]) + text for number in (17, 18, 19) for text in (b"foo", b"bar")]
    first = int(log.stem)
    log.write_bytes(encode_batch([Rec(i, BASE_MS, keys[i % 6], b"v") for i in range(first, 400)]))
    close_active(log.parent)
    schema, path = tmp_path / "key.avsc", tmp_path / "keys"
    schema.write_text('"string"')
    path.write_text('"foo"\n')
    flags = ("--key-format", "avro", "--key-schema", f"17={schema}", "--key-schema", f"18={schema}")
    status, rows = erase(run, closed, path, "--partitions", "orders-0", "--execute", *flags)
    assert (status, rows["orders-0"]["status"], rows["orders-0"]["keys_found"]) == (0, "erased", 2)
    left = [record.key for record in records_of(log.parent) if record.offset >= first]
    assert left == [key for key in (keys[i % 6] for i in range(first, 400)) if key not in (keys[0], keys[2])]


def test_the_ledger_has_the_numbers_and_no_key(run: Run, closed: Path, keys_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("deltalake")
    import hashlib

    from keytail.ledger.read import read_rows

    ledger = tmp_path / "ledger"
    _, rows = erase(run, closed, keys_file, "--topic", "orders", "--execute", "--ledger", ledger)
    assert {row["status"] for row in rows.values()} == {"erased"}
    [of_run] = read_rows(str(ledger), "runs", {"event": "outcome"})
    config = of_run["config"]
    assert config["SHA-256 of --keys-file"] == hashlib.sha256(keys_file.read_bytes()).hexdigest()
    assert config["keys"] == "3" and config["user"]
    assert (of_run["command"], of_run["status"]) == ("erase", "done")
    erased = sum(row["records_erased"] for row in rows.values())
    assert of_run["records_before"] - of_run["records_after"] == erased
    partitions = read_rows(str(ledger), "partitions", {"event": "outcome"})
    assert sorted(row["status"] for row in partitions) == ["erased", "erased"]
    segments = read_rows(str(ledger), "segments", {})
    assert len(segments) == 8 and {row["index_status"] for row in segments} == {"good"}
    page = tmp_path / "page.html"
    assert run("report", "--ledger", ledger, page).exit_code == 0
    assert f"Erased {erased} records in 2 of 2 partitions." in page.read_text()
    text = json.dumps([of_run, *partitions, *segments], default=str) + page.read_text()
    assert not any(key.decode() in text for key in KEYS)


def test_the_page_has_the_numbers_and_no_key(run: Run, closed: Path, keys_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    page = tmp_path / "page.html"
    _, rows = erase(run, closed, keys_file, "--topic", "orders", "--report", page)
    count = sum(row["records_erased"] for row in rows.values())
    assert f"To erase: {count} records in 2 of 2 partitions. Nothing was changed." in page.read_text()
    erase(run, closed, keys_file, "--topic", "orders", "--execute", "--report", page)
    text = page.read_text()
    assert f"Erased {count} records in 2 of 2 partitions." in text and "records_erased" in text
    assert not any(key.decode() in text or key.hex() in text for key in KEYS)


def test_a_backup_that_the_ledger_knows_is_refused(
    run: Run, closed: Path, keys_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deltalake")
    ledger, backup = tmp_path / "ledger", tmp_path / "backup"
    flags = ("--log-dirs", closed, *KNOWN, "--topic-config", "orders:cleanup.policy=compact", "--ledger", ledger)

    def compact(*more: str | Path) -> None:
        monkeypatch.setattr(sys, "argv", ["keytail", "compact", *map(str, more)])  # the ledger records it
        done = run("compact", *flags, *more, "--execute")
        assert done.exit_code == 0, done.output

    compact("--partitions", "orders-0", "--keep-originals", backup)
    assert "a backup of the partition is in" in refused(run, closed, keys_file, "--execute", "--ledger", ledger)
    run_id = next(path.name for path in backup.iterdir())
    alias = tmp_path / "alias"
    alias.symlink_to(closed)
    _, rows = erase(run, alias, keys_file, "--partitions", "orders-0", "--execute", "--ledger", ledger)
    assert rows["orders-0"]["status"] == "refused"
    run("undo", "--originals", backup, "--run", run_id, "--forget", "--execute")
    _, rows = erase(run, closed, keys_file, "--topic", "orders", "--execute", "--ledger", ledger)
    assert {row["status"] for row in rows.values()} == {"erased"}


@pytest.mark.parametrize("command", ["compact", "compact --repack"])
def test_backups_of_compactions_and_repacks_are_found(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [
        {"command": command, "log_dirs": ["/logs"], "arguments": ["--keep-originals", "relative"]},
        {"command": command, "log_dirs": ["/others"], "arguments": ["--keep-originals", "/kept"]},
    ]

    def read_rows(path: str, table: str, keys: dict[str, str], session: object) -> list[dict[str, Any]]:
        return [row for row in runs if row["command"] == keys["command"]]

    monkeypatch.setattr("keytail.ledger.read.read_rows", read_rows)
    found = backups.backups_of_ledger("/ledger", ["/logs"], None)
    assert found.directories == ("relative",)
    [reason] = found.reasons(LOCAL, "orders-0")
    assert "relative to an unknown directory" in reason
