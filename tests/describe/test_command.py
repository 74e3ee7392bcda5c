from __future__ import annotations

from pathlib import Path

import pytest

from keytail.config.keys import NOT_USED, not_used
from tests.command_line import Run, rows_of
from tests.log_dirs import random_records, records_of, snapshot, write_log_dir

ORDERS = ("--topics-have-no-overrides", "--topic-config", "orders:cleanup.policy=compact")


def test_contents_of_partitions_and_obstacles_are_listed(run: Run, log_dir: Path) -> None:
    before = snapshot(log_dir)
    result = run("describe", "--log-dirs", log_dir, *ORDERS, "--output", "json")
    assert result.exit_code == 0, result.output
    rows = rows_of(result)
    assert list(rows) == ["orders-0", "orders-1", "users-0"]
    orders = rows["orders-0"]
    logs = sorted((log_dir / "orders-0").glob("*.log"))
    assert orders["segments"] == len(logs) == 4
    assert orders["bytes"] == sum(log.stat().st_size for log in logs)
    assert (orders["offsets"], orders["records"]) == (400, None)
    assert (orders["log_start_offset"], orders["log_end_offset"], orders["high_watermark"]) == (0, 400, 400)
    assert (orders["eligible"], orders["blocker"], orders["dirty_ratio"]) == (True, "", 1.0)
    assert (orders["first_dirty_offset"], orders["end_dirty_offset"]) == (0, 300)
    assert orders["cleanable_bytes"] == sum(log.stat().st_size for log in logs[:3])
    users = rows["users-0"]
    assert (users["eligible"], users["overrides_known"]) == (False, False)
    assert "topic config unknown" in users["blocker"]
    assert users["dirty_ratio"] is not None
    assert snapshot(log_dir) == before
    assert not (log_dir / ".lock").exists()


def test_settings_are_shown_with_their_source(run: Run, log_dir: Path, tmp_path: Path) -> None:
    properties = tmp_path / "server.properties"
    properties.write_text("log.cleaner.delete.retention.ms=60000\nssl.keystore.password=secret\n")
    arguments = ("describe", "--log-dirs", log_dir, "--config", properties, "--topic", "orders", *ORDERS)
    result = run(*arguments, "--output", "json")
    settings = rows_of(result)["orders-0"]["settings"]
    assert settings == {
        "cleanup.policy": {"value": ["compact"], "source": "command line: orders:cleanup.policy=compact"},
        "delete.retention.ms": {
            "value": 60000,
            "source": f"{properties}: log.cleaner.delete.retention.ms=60000",
        },
    }
    every = rows_of(run(*arguments, "--all", "--output", "json"))["orders-0"]["settings"]
    assert every["segment.bytes"] == {"value": 1_073_741_824, "source": "Kafka's default"}
    assert settings.items() <= every.items()
    assert {name: item["note"] for name, item in every.items() if "note" in item} == {
        name: not_used(name) for name in NOT_USED
    }
    assert "not used, see --throttle" in run(*arguments, "--all").stdout
    table = run(*arguments).stdout
    assert "60000 (1 min)" in table
    assert "secret" not in table + result.stdout


@pytest.mark.parametrize(
    "command, setting, status",
    [
        (("describe",), "log.cleaner.threads=many", 0),
        (("describe",), "log.cleaner.io.max.bytes.per.second=${file:/x:y}", 0),
        (("describe",), "log.retention.ms=never", 2),
        (("describe", "--topic-config", "retention.ms=1000"), "log.retention.ms=never", 0),
        (("verify",), "log.retention.ms=never", 0),
        (("lookup", "--offset", "0"), "log.segment.bytes=1g", 0),
    ],
)
def test_only_settings_that_a_command_needs_stop_it(
    command: tuple[str, ...], setting: str, status: int, run: Run, log_dir: Path, tmp_path: Path
) -> None:
    properties = tmp_path / "server.properties"
    properties.write_text(f"log.dirs={log_dir}\n{setting}\n")
    result = run(*command, "--config", properties)
    assert result.exit_code == status, result.stderr
    assert setting.partition("=")[0] in result.stderr
    assert ("is not needed here and is ignored" in result.stderr.replace("\n", " ")) == (status == 0)


@pytest.mark.parametrize("given, expected, text", [
    ("2.8", "v2", "v1 in format v2. Topics: all"),
    ("0.10.2", "keep", "v1 in their own format"),
    (None, "unknown", "Compaction refuses messages of formats v0 and v1; to compact them, give --message-format"),
])  # fmt: skip
def test_the_conversion_of_old_messages_is_shown(
    run: Run, log_dir: Path, given: str | None, expected: str, text: str
) -> None:
    (log_dir / "meta.properties").unlink()  # no file indicates KRaft, which has no older format
    stated = ["--topic-config", f"orders:message.format.version={given}"] if given else []
    arguments = ("describe", "--log-dirs", log_dir, "--topic", "orders", *ORDERS[1:], *stated)
    assert rows_of(run(*arguments, "--output", "json"))["orders-0"]["message_format"] == expected
    assert text in run(*arguments).stdout


def test_records_are_counted_on_request(run: Run, log_dir: Path) -> None:
    """The offsets have a gap, as after a cleaning, so that the two numbers differ."""
    records = [record for record in random_records(9, 400) if record.offset % 3 == 0]
    write_log_dir(log_dir, {"gaps-0": records})
    row = rows_of(run("describe", "--log-dirs", log_dir, "--topic", "gaps", "--records", "--output", "json"))["gaps-0"]
    assert row["records"] == len(records) == len(records_of(log_dir / "gaps-0"))
    assert row["offsets"] == 400
    assert "134" in run("describe", "--log-dirs", log_dir, "--topic", "gaps", "--records").stdout


@pytest.mark.parametrize("topics, status", [("orders|users", 3), ("orders", 1)])
def test_records_that_cannot_be_counted_are_reported_with_their_position(
    run: Run, log_dir: Path, topics: str, status: int
) -> None:
    for partition in ("orders-0", "orders-1"):
        log = log_dir / partition / f"{100:020d}.log"
        data = bytearray(log.read_bytes())
        data[100] ^= 1
        log.write_bytes(data)
    arguments = ("describe", "--log-dirs", log_dir, "--topic", topics)
    assert run(*arguments).exit_code == 0
    result = run(*arguments, "--records", "--output", "json")
    assert result.exit_code == status
    row = rows_of(result)["orders-0"]
    assert row["records"] is None
    assert f"{100:020d}.log, byte position 0" in row["error"]


@pytest.mark.parametrize(
    "arguments, what",
    [
        (("--log-dirs", "/nonexistent"), "no such log dir"),
        (("--log-dirs", "{}", "--topic", "nobody"), "[unknown-topic-or-partition]"),
        (("--log-dirs", "{}", "--partitions", "orders-7"), "Did you mean orders-"),
    ],
)
def test_wrong_usage_is_refused(run: Run, log_dir: Path, arguments: tuple[str, ...], what: str) -> None:
    result = run("describe", *(argument.format(log_dir) for argument in arguments))
    assert result.exit_code == 2
    assert what in result.stderr
