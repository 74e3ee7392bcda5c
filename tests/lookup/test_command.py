"""The command `lookup`: rows, messages, exit statuses, and that it changes nothing."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from keytail.cli.options import parse_time
from keytail.errors import UsageProblem
from keytail.lookup.command import preview
from tests.command_line import Run, rows_of
from tests.log_dirs import BASE_MS, records_of, snapshot, write_log_dir
from tests.reference.batches import Rec


def test_a_record_is_found_by_offset_and_by_time(run: Run, log_dir: Path) -> None:
    before = snapshot(log_dir)
    expected = records_of(log_dir / "orders-1")[217]
    assert (expected.offset, expected.timestamp) == (217, BASE_MS + 217)
    for flags in (("--offset", "217"), ("--timestamp", str(BASE_MS + 217)), ("--timestamp", "2023-11-14T22:13:20.217")):
        result = run("lookup", "--log-dirs", log_dir, "--partitions", "orders-1", *flags, "--output", "json")
        assert result.exit_code == 0, result.stderr
        row = rows_of(result)["orders-1"]
        assert (row["status"], row["offset"], row["timestamp_ms"]) == ("found", 217, BASE_MS + 217)
        assert (row["segment"], row["batch_base_offset"], row["batch_last_offset"]) == (200, 210, 219)
        assert row["byte_position"] > 0
        assert row["leader_epoch"] == 0
        assert row["key"] == expected.key.decode()  # type: ignore[union-attr]
        assert row["value"] == (None if expected.value is None else expected.value.decode())
        assert row["steps"] == row["notes"] == []
    assert snapshot(log_dir) == before


KEYS = (None, b"", b"order-7", "f\u00fcr \x1b[31m\n".encode() * 100, b"\xff\x00" * 100)


@pytest.mark.parametrize("key", KEYS, ids=["null", "empty", "short", "long", "not text"])
def test_keys_and_values_are_complete_in_json(key: bytes | None, run: Run, tmp_path: Path) -> None:
    log_dir = write_log_dir(tmp_path / "logs", {"t-0": [Rec(0, BASE_MS, key, key)]})
    flags = ("lookup", "--log-dirs", log_dir, "--offset", "0")
    result = run(*flags, "--output", "json")
    assert result.exit_code == 0, result.stderr
    row = rows_of(result)["t-0"]
    for name in ("key", "value"):
        text, in_base64 = row[name], row[f"{name}_base64"]
        assert text is None or in_base64 is None
        assert key == (text.encode() if text is not None else in_base64 and base64.b64decode(in_base64))
    shown = run(*flags).stdout
    assert ("null  null" if key is None else preview(key)) in shown


def test_the_steps_of_explain_are_numbered(run: Run, log_dir: Path) -> None:
    flags = ("lookup", "--log-dirs", log_dir, "--topic", "orders", "--offset", "217")
    result = run(*flags, "--explain")
    assert result.exit_code == 0
    assert "orders-0, step by step:" in result.stdout
    assert "orders-1, step by step:" in result.stdout
    assert f"  2. The segment with the largest base offset not above 217 is {200:020d}.log" in result.stdout
    assert "step by step" not in run(*flags).stdout
    rows = rows_of(run(*flags, "--explain", "--output", "json"))
    assert all(len(row["steps"]) == 5 for row in rows.values())


def test_a_record_that_is_not_found_is_reported(run: Run, log_dir: Path) -> None:
    (log_dir / "users-0" / f"{100:020d}.index").unlink()
    for flags, status, message in (
        (("--offset", "400"), "none", "400 is the log end offset"),
        (("--offset", "401"), "out-of-range", "a broker rejects the fetch as out of range"),
        (("--timestamp", str(BASE_MS + 10**6)), "none", "no segment has a timestamp at or after"),
        (("--offset", "150"), "found", "00000000000000000100.index is missing"),
    ):
        result = run("lookup", "--log-dirs", log_dir, "--partitions", "users-0", *flags)
        assert result.exit_code == 0
        assert message in result.stdout
        row = rows_of(run("lookup", "--log-dirs", log_dir, "--partitions", "users-0", *flags, "--output", "json"))
        assert row["users-0"]["status"] == status


def test_damage_is_reported_beside_the_answers_of_other_partitions(run: Run, log_dir: Path) -> None:
    damaged = log_dir / "orders-1" / f"{100:020d}.log"
    data = bytearray(damaged.read_bytes())
    data[100] ^= 1
    damaged.write_bytes(data)
    (log_dir / "users-0" / f"{0:020d}.log").unlink()
    for file in (log_dir / "users-0").glob("*.log"):
        file.unlink()
    result = run("lookup", "--log-dirs", log_dir, "--offset", "105", "--output", "json")
    assert result.exit_code == 3
    rows = rows_of(result)
    assert {name: row["status"] for name, row in rows.items()} == {
        "orders-0": "found",
        "orders-1": "corrupt",
        "users-0": "failed",
    }
    assert f"{damaged}, byte position 0)" in rows["orders-1"]["error"]
    assert "no segments in" in rows["users-0"]["error"]
    assert run("lookup", "--log-dirs", log_dir, "--partitions", "users-0", "--offset", "1").exit_code == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "Give one of --offset and --timestamp"),
        (("--offset", "1", "--timestamp", "1"), "--offset and --timestamp cannot be combined"),
        (("--offset", "-1"), "not a whole number from 0 to"),
        (("--timestamp", "-2"), "the first and the last offset in Kafka's tools"),
        (("--timestamp", "yesterday"), "milliseconds since 1970, or a time such as"),
        (("--offset", "1", "--partitions", "order-0"), "Did you mean orders-0?"),
    ],
)
def test_wrong_usage_is_refused(flags: tuple[str, ...], message: str, run: Run, log_dir: Path) -> None:
    result = run("lookup", "--log-dirs", log_dir, *flags, "--output", "json")
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_a_directory_that_is_not_a_log_dir_is_refused(run: Run, log_dir: Path) -> None:
    result = run("lookup", "--log-dirs", log_dir / "orders-0", "--offset", "1")
    assert result.exit_code == 2
    assert "not a log dir" in result.stderr


def test_a_segment_that_a_running_broker_deletes_is_not_an_error(
    run: Run, log_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from keytail.lookup import driver as module

    (log_dir / ".kafka_cleanshutdown").unlink()
    examined = []

    def look(fs, facts, offset):
        if not examined:
            examined.append(offset)
            for file in (log_dir / "orders-0").glob(f"{0:020d}.*"):
                file.unlink()
        return before(fs, facts, offset)

    before = module.lookup_offset
    monkeypatch.setattr(module, "lookup_offset", look)
    result = run("lookup", "--log-dirs", log_dir, "--partitions", "orders-0", "--offset", "3", "--output", "json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)[0]["status"] == "out-of-range"  # the offset is below the current log start


@pytest.mark.parametrize(
    ("text", "timestamp_ms"),
    [
        ("0", 0),
        ("1700000000000", 1_700_000_000_000),
        ("2023-11-14T22:13:20Z", 1_700_000_000_000),
        ("2023-11-14T22:13:20", 1_700_000_000_000),
        ("2023-11-14 23:13:20.001+01:00", 1_700_000_000_001),
        ("2023-11-14T22:13:20.000001Z", 1_700_000_000_001),  # rounded up, because no earlier record may be found
        ("2023-11-14", 1_699_920_000_000),
    ],
)
def test_times_are_parsed_as_milliseconds_or_iso_8601(text: str, timestamp_ms: int) -> None:
    assert parse_time(text) == timestamp_ms


@pytest.mark.parametrize("text", ["", "1.5", "-1", "9223372036854775808", "1969-12-31T23:59:59Z", "14.11.2023"])
def test_invalid_times_are_refused(text: str) -> None:
    with pytest.raises(UsageProblem):
        parse_time(text)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", ""),
        ("für".encode(), "für"),
        (b"a\x00\nb\xff", "a\\x00\\nb\\xff"),
        (b"x" * 60, "x" * 60),
        (b"x" * 61, "x" * 60 + "... (61 bytes)"),
        ("\N{SNOWMAN}".encode() * 2000, "\N{SNOWMAN}" * 60 + "... (6,000 bytes)"),
        (b"\x1b[31m", "\\x1b[31m"),  # a terminal gets no control characters
    ],
)
def test_previews_are_printable_and_short(data: bytes, text: str) -> None:
    assert preview(data) == text
