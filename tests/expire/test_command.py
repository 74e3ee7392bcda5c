"""`keytail expire` through the command line: its rows, and the files that it changes or leaves unchanged."""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from keytail.cli import rows as show
from keytail.log.lock import hold
from tests.command_line import Run, rows_of
from tests.log_dirs import BASE_MS, random_records, records_of, snapshot, write_log_dir
from tests.reference.batches import decode_log

KNOWN = (
    "--topics-have-no-overrides", "--topic-config", "orders:cleanup.policy=delete", "--topic-config",
    "users:cleanup.policy=delete",
)  # fmt: skip
SETTINGS = {"cleanup.policy": "delete", "remote.storage.enable": "false", "retention.ms": "-1", "retention.bytes": "-1"}
PRINTED = " sensitive=false synonyms={}"  # kafka-configs.sh prints this after a setting


def run_expire(run: Run, log_dir: Path, *more: str, known: bool = True) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return exit status and rows of `expire` with `more` and with all settings that retention requires; those that no
    topic overrides come from the broker's file.
    """
    properties = log_dir.parent / "server.properties"
    properties.write_text("log.retention.hours=168\n")
    flags = ("--log-dirs", log_dir, "--config", properties, "--output", "json")
    result = run("expire", *flags, *(KNOWN if known else ()), *more)
    return result.exit_code, rows_of(result)


def statuses(rows: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: row["status"] for name, row in rows.items()}


def older_than(offset: int) -> tuple[str, ...]:
    """Return flags with which exactly the records below `offset` are past retention."""
    now_ms = time.time_ns() // 1_000_000
    return ("--now", str(now_ms), "--topic-config", f"retention.ms={now_ms - BASE_MS - offset}")


def reasons(row: dict[str, Any]) -> list[tuple[int, str]]:
    return [(segment["base_offset"], segment["reason"]) for segment in row["expired"]]


def bases(partition: Path) -> list[int]:
    return sorted(int(path.stem) for path in partition.glob("*.log"))


def test_a_dry_run_reports_what_would_be_removed_and_why_and_changes_nothing(run: Run, log_dir: Path) -> None:
    before = snapshot(log_dir)
    (log_dir / "log-start-offset-checkpoint").write_text("0\n1\nusers 0 120\n")
    flags = older_than(200)
    status, rows = run_expire(run, log_dir, *flags)
    assert status == 0
    assert set(statuses(rows).values()) == {"would-expire"}
    assert reasons(rows["orders-0"]) == [(0, "time"), (100, "time")]
    assert reasons(rows["users-0"]) == [(0, "log-start"), (100, "time")]
    row = rows["orders-0"]
    assert [segment["log_bytes"] for segment in row["expired"]] == [
        len(before[f"orders-0/{base:020d}.log"][0]) for base in (0, 100)
    ]
    assert (row["segments_before"], row["segments_after"]) == (4, 2)
    assert row["bytes_after"] == row["bytes_before"] - sum(segment["log_bytes"] for segment in row["expired"])
    assert (row["log_start_before"], row["log_start_after"], row["log_end_offset"]) == (0, 200, 400)
    assert row["kept"].startswith("segment 200 is retained: it has records within retention.ms")
    result = run("expire", "--log-dirs", log_dir, *KNOWN, *flags)
    assert "users-0 segment 0 (offsets to 99, 2.7 KiB) log-start: below the log start offset 120" in result.stdout
    assert "3 partitions: 3 would-expire. To remove: " in result.stdout
    assert "--execute" in result.stderr
    (log_dir / "log-start-offset-checkpoint").unlink()
    assert snapshot(log_dir) == before


def test_segments_with_one_reason_have_one_line_except_with_verbose(run: Run, log_dir: Path) -> None:
    (log_dir / "log-start-offset-checkpoint").write_text("0\n1\nusers 0 120\n")
    flags = ("--log-dirs", log_dir, *KNOWN, *older_than(300))
    out = run("expire", *flags).stdout
    lines = [line for line in out.splitlines() if line.startswith(("orders-0 seg", "users-0 seg"))]
    assert len(lines) == 3
    size = show.human_bytes(sum((log_dir / "orders-0" / f"{base:020d}.log").stat().st_size for base in (0, 100, 200)))
    start = f"orders-0 segments 0 to 200 (3 segments, offsets to 299, {size}) time: segment 200: its newest record is "
    assert lines[0].startswith(start)
    assert lines[1].startswith("users-0 segment 0 (offsets to 99, ")
    assert lines[2].startswith("users-0 segments 100 to 200 (2 segments, offsets to 299, ")
    assert out.count("--verbose lists each segment.") == 1
    verbose = run("expire", *flags, "--verbose").stdout
    assert verbose.count("orders-0 segment ") == verbose.count("users-0 segment ") == 3
    assert "orders-0 segment 100 (offsets to 199, " in verbose
    assert "--verbose lists" not in verbose


def test_expired_segments_are_removed_and_the_rest_is_unchanged(run: Run, log_dir: Path) -> None:
    before, records = snapshot(log_dir), records_of(log_dir / "orders-0")
    flags = older_than(200)
    status, rows = run_expire(run, log_dir, *flags, "--execute")
    assert (status, set(statuses(rows).values())) == (0, {"expired"})
    after = snapshot(log_dir)
    changed = {name for name, file in after.items() if before.get(name) != file}
    assert changed == {
        "log-start-offset-checkpoint", *(f"{name}/leader-epoch-checkpoint" for name in rows)
    }  # fmt: skip
    stems = [f"{name}/{base:020d}" for name in rows for base in (0, 100)]
    assert {name for name in before if name not in after} == {
        stem + suffix for stem in stems for suffix in (".log", ".index", ".timeindex")
    }
    assert records_of(log_dir / "orders-0") == records[200:]
    text = "0\n3\norders 0 200\norders 1 200\nusers 0 200\n"
    assert (log_dir / "log-start-offset-checkpoint").read_text() == text
    assert (log_dir / "orders-0" / "leader-epoch-checkpoint").read_text() == "0\n1\n0 200\n"
    status, rows = run_expire(run, log_dir, *flags, "--execute")
    assert (status, set(statuses(rows).values())) == (0, {"kept"})
    assert snapshot(log_dir) == after
    assert run("verify", "--log-dirs", log_dir, "--output", "json").exit_code in (0, 1)


def test_each_topic_has_its_own_policy_and_retention_bytes(run: Run, log_dir: Path) -> None:
    size = sum(path.stat().st_size for path in (log_dir / "orders-0").glob("*.log"))
    first = (log_dir / "orders-0" / f"{0:020d}.log").stat().st_size
    config = [
        f"orders:retention.bytes={size - first}", "orders:retention.ms=-1", "orders:cleanup.policy=delete",
        "remote.storage.enable=false", "users:cleanup.policy=compact",
    ]  # fmt: skip
    flags = [word for setting in config for word in ("--topic-config", setting)]
    status, rows = run_expire(run, log_dir, *flags, "--partitions", "orders-0,users-0", known=False)
    assert status == 0
    assert reasons(rows["orders-0"]) == [(0, "size")]
    assert f"{size - first:,} bytes remain without it" in rows["orders-0"]["expired"][0]["why"]
    assert rows["users-0"]["status"] == "kept"
    assert "cleanup.policy is [compact]" in rows["users-0"]["kept"]


def test_a_log_that_is_removed_entirely_begins_at_its_end(run: Run, log_dir: Path) -> None:
    status, rows = run_expire(run, log_dir, "--partitions", "orders-0", "--topic-config", "retention.ms=0", "--execute")
    row = rows["orders-0"]
    assert (status, row["status"], row["segments_after"], row["bytes_after"]) == (0, "expired", 1, 0)
    assert (row["log_start_after"], row["log_end_offset"]) == (400, 400)
    assert "no segment remains" in row["notes"][0]
    left = {path.name: path.stat().st_size for path in (log_dir / "orders-0").iterdir()}
    assert left.pop("leader-epoch-checkpoint")
    assert left == {f"{400:020d}{suffix}": 0 for suffix in (".log", ".index", ".timeindex")}
    status, rows = run_expire(run, log_dir, "--partitions", "orders-0", "--topic-config", "retention.ms=0", "--execute")
    assert (status, rows["orders-0"]["status"]) == (0, "kept")


def test_settings_of_topics_must_be_known(run: Run, log_dir: Path) -> None:
    before = snapshot(log_dir)
    status, rows = run_expire(run, log_dir, "--execute", known=False)
    assert (status, set(statuses(rows).values())) == (1, {"refused"})
    assert "topic config unknown" in rows["orders-0"]["error"]
    for name in SETTINGS:
        given = [word for key in SETTINGS if key != name for word in ("--topic-config", f"users:{key}={SETTINGS[key]}")]
        row = run_expire(run, log_dir, *given, "--execute", known=False)[1]["users-0"]
        assert (row["status"], f"Unknown settings of users: {name}. Give" in row["error"]) == ("refused", True), row
    given = [word for key, text in SETTINGS.items() for word in ("--topic-config", f"users:{key}={text}")]
    status, rows = run_expire(run, log_dir, *given, "--execute", known=False)
    assert (status, statuses(rows)["users-0"]) == (3, "kept")
    assert snapshot(log_dir) == before


def test_a_given_setting_does_not_make_the_policy_known(run: Run, tmp_path: Path) -> None:
    """An earlier version, called in this way without a metadata log, deleted a compacted topic."""
    path = write_log_dir(tmp_path / "logs", {"customers-0": random_records(1, 400)})
    before = snapshot(path)
    for more in ((), ("--topics-have-no-overrides",), ("--config", tmp_path / "server.properties")):
        (tmp_path / "server.properties").write_text("log.cleanup.policy=delete\n")
        flags = ("--topic-config", "customers:segment.bytes=1048576", "--execute", *more)
        result = run("expire", "--log-dirs", path, *flags, "--output", "json")
        row = rows_of(result)["customers-0"]
        assert (result.exit_code, row["status"]) == (1, "refused")
        assert "Unknown settings of customers: cleanup.policy" in row["error"]
        assert "--topics-have-no-overrides" not in row["error"], (
            "the error must not advise to continue without the policy"
        )
    assert snapshot(path) == before


INTERNAL = ("__consumer_offsets", "__transaction_state", "__share_group_state", "__remote_log_metadata")


@pytest.mark.parametrize(
    "more",
    [
        (),
        tuple(word for topic in INTERNAL for word in ("--topic-config", f"{topic}:cleanup.policy=delete")),
        ("--topic-config", "retention.ms=1", "--topic-config", "retention.bytes=0"),
        ("--topic-configs", "file"),
    ],
)
def test_internal_topics_are_unchanged_without_a_metadata_log(
    run: Run, tmp_path: Path, more: tuple[str, ...]
) -> None:
    """An earlier version of `expire --topics-have-no-overrides --execute` emptied these topics."""
    path = write_log_dir(tmp_path / "logs", {f"{topic}-0": random_records(1, 400) for topic in INTERNAL})
    printed = [f"Dynamic configs for topic {topic} are:\n  cleanup.policy=delete{PRINTED}" for topic in INTERNAL]
    (tmp_path / "file").write_text("\n".join(printed))
    before = snapshot(path)
    flags = [str(tmp_path / word) if word == "file" else word for word in more]
    result = run(
        "expire", "--log-dirs", path, "--topics-have-no-overrides", "--execute", *flags, "--output", "json"
    )
    rows = rows_of(result)
    assert (result.exit_code, statuses(rows)) == (1, dict.fromkeys((f"{topic}-0" for topic in INTERNAL), "refused"))
    assert all("is an internal topic of Kafka" in row["error"] for row in rows.values())
    assert snapshot(path) == before


def test_the_retention_of_the_broker_is_not_assumed(run: Run, log_dir: Path) -> None:
    """Settings that no topic overrides are those of the broker's file or, if the file does not set them, Kafka's
    defaults.
    """
    before = snapshot(log_dir)
    result = run("expire", "--log-dirs", log_dir, *KNOWN, "--execute", "--output", "json")
    assert (result.exit_code, set(statuses(rows_of(result)).values())) == (1, {"refused"})
    for row in rows_of(result).values():
        assert f"retention.ms of {row['topic']} is set by the broker's own configuration" in row["error"]
        assert "--config FILE" in row["error"]
    assert snapshot(log_dir) == before


def test_settings_are_read_from_a_file(run: Run, log_dir: Path, tmp_path: Path) -> None:
    """If the file has the output of kafka-configs.sh, all overrides are known; if it has one setting per line, a policy
    that is not listed is unknown. Settings that are not listed are those of the broker, whose policy is not given.
    """
    file = tmp_path / "topics"
    file.write_text(
        f"Dynamic configs for topic orders are:\n  cleanup.policy=delete{PRINTED}\n  retention.ms=1{PRINTED}\n"
        f"  min.insync.replicas=1{PRINTED}\n"
        "users:retention.ms=1\nelsewhere:retention.ms=1\n"
    )
    flags = ("--topic-configs", str(file))
    status, rows = run_expire(run, log_dir, *flags, known=False)
    assert (status, statuses(rows)) == (
        3, {"orders-0": "would-expire", "orders-1": "would-expire", "users-0": "refused"}
    )  # fmt: skip
    assert "Unknown settings of users: cleanup.policy. Give" in rows["users-0"]["error"]
    result = run("expire", "--log-dirs", log_dir, *flags)
    assert "--topic-configs has topics without a partition in the log dirs: elsewhere" in result.stderr
    more = ("--topic-config", "users:cleanup.policy=delete", "--topic-config", "orders:retention.ms=-1")
    status, rows = run_expire(run, log_dir, *flags, *more, known=False)
    assert (status, statuses(rows)) == (0, {"orders-0": "kept", "orders-1": "kept", "users-0": "would-expire"})


@pytest.mark.parametrize("header", ["All", "Dynamic"])
def test_a_policy_missing_from_the_output_is_not_assumed(
    run: Run, log_dir: Path, tmp_path: Path, header: str
) -> None:
    """The output was truncated or filtered, or the topic has the broker's dynamic default, which is not read."""
    file = tmp_path / "topics"
    file.write_text(f"{header} configs for topic orders are:\n  retention.ms=1{PRINTED}\n")
    before = snapshot(log_dir)
    flags = ("--topic-configs", str(file), "--topic-list", "orders", "--execute")
    status, rows = run_expire(run, log_dir, *flags, known=False)
    assert (status, set(statuses(rows).values())) == (1, {"refused"})
    assert "cleanup.policy" in rows["orders-0"]["error"]
    assert snapshot(log_dir) == before


def test_unsuitable_states_are_refused(run: Run, log_dir: Path) -> None:
    status, rows = run_expire(run, log_dir, "--topic-config", "orders:remote.storage.enable=true")
    assert (status, rows["orders-0"]["status"], rows["users-0"]["status"]) == (3, "refused", "would-expire")
    assert "tiered" in rows["orders-0"]["error"]
    for base in (0, 100):
        for path in (log_dir / "users-0").glob(f"{base:020d}.*"):
            path.unlink()
    (log_dir / "log-start-offset-checkpoint").write_text("0\n1\nusers 0 150\n")
    assert "is below the first segment (200)" in run_expire(run, log_dir)[1]["users-0"]["error"]
    (log_dir / "log-start-offset-checkpoint").write_text("0\n1\nusers 0 1000\n")
    assert "deletes the whole log" in run_expire(run, log_dir)[1]["users-0"]["error"]
    (log_dir / "log-start-offset-checkpoint").unlink()
    (log_dir / f"users-0.{'a' * 32}-future").mkdir()
    assert "moving" in run_expire(run, log_dir)[1]["users-0"]["error"]
    (log_dir / "replication-offset-checkpoint").unlink()
    assert "no high watermark" in run_expire(run, log_dir)[1]["orders-0"]["error"]
    rows = run_expire(run, log_dir, "--high-watermark", "log-end")[1]
    assert rows["orders-0"]["status"] == "would-expire"


def test_expire_refuses_a_clock_that_is_probably_wrong(run: Run, log_dir: Path) -> None:
    early = ("--now", str(time.time_ns() // 1_000_000 - 2 * 3_600_000))
    status, rows = run_expire(run, log_dir, *early)
    assert (status, rows["orders-0"]["status"]) == (1, "refused")
    assert "behind the newest segment" in rows["orders-0"]["error"]
    assert run_expire(run, log_dir, *early, "--unsafe-clock")[0] == 0
    late = ("--now", str(time.time_ns() // 1_000_000 + 2 * 3_600_000))
    assert run_expire(run, log_dir, *late)[0] == 0
    before = snapshot(log_dir)
    result = run("expire", "--log-dirs", log_dir, *KNOWN, *late, "--execute")
    assert result.exit_code == 1
    assert "with a wrong time, records are removed too early" in result.stderr
    assert snapshot(log_dir) == before


def test_a_corrupt_partition_does_not_stop_the_others(run: Run, log_dir: Path) -> None:
    damaged = log_dir / "orders-1" / f"{100:020d}.log"
    data = bytearray(damaged.read_bytes())
    position = decode_log(bytes(data))[3].position
    data[position + 70] ^= 1
    damaged.write_bytes(data)
    before = snapshot(log_dir / "orders-1")
    status, rows = run_expire(run, log_dir, *older_than(200), "--execute")
    assert status == 3
    assert statuses(rows) == {"orders-0": "expired", "orders-1": "corrupt", "users-0": "expired"}
    assert f"byte position {position}" in rows["orders-1"]["error"]
    assert rows["orders-1"]["segments_after"] == 4
    assert snapshot(log_dir / "orders-1") == before
    # Segments that are not read are not checked: by size, the segment is removed without being read.
    sizes = ("--topic-config", "retention.ms=-1", "--topic-config", "retention.bytes=0")
    assert run_expire(run, log_dir, *sizes)[1]["orders-1"]["status"] == "would-expire"


def test_an_index_of_zeros_is_reported_and_not_trusted(run: Run, log_dir: Path) -> None:
    """A broker would assume that the segment is from 1970, and delete it immediately."""
    assert run("rebuild-index", "--log-dirs", log_dir, "--execute").exit_code == 0  # this creates the snapshots, too
    wrong = log_dir / "orders-0" / f"{200:020d}.timeindex"
    wrong.write_bytes(bytes(1200))
    flags = older_than(200)
    status, rows = run_expire(run, log_dir, *flags, "--partitions", "orders-0")
    row = rows["orders-0"]
    assert (status, row["status"], reasons(row)) == (1, "would-expire", [(0, "time"), (100, "time")])
    [finding] = row["findings"]
    assert (finding["base_offset"], finding["broker_deletes"]) == (200, True)
    assert "rebuild-index" in finding["remedy"]
    result = run("expire", "--log-dirs", log_dir, *KNOWN, *flags, "--partitions", "orders-0", "--execute")
    assert result.exit_code == 1
    assert "error: the time index of segment 200 ends with 0 ms" in result.stdout
    assert "before you start the broker" in result.stderr
    assert bases(log_dir / "orders-0") == [200, 300]
    assert run("rebuild-index", "--log-dirs", log_dir, "--partitions", "orders-0", "--execute").exit_code == 0
    status, rows = run_expire(run, log_dir, *flags, "--partitions", "orders-0")
    assert (status, rows["orders-0"]["status"], rows["orders-0"]["findings"]) == (0, "kept", [])


def test_an_index_time_in_the_future_does_not_retain_a_segment(run: Run, log_dir: Path) -> None:
    (log_dir / "orders-0" / f"{0:020d}.timeindex").write_bytes((2**60).to_bytes(8, "big") + bytes(4))
    (log_dir / "orders-0" / f"{100:020d}.timeindex").unlink()  # the file of the segment is recent
    status, rows = run_expire(run, log_dir, *older_than(200), "--partitions", "orders-0", "--execute")
    assert (status, reasons(rows["orders-0"])) == (0, [(0, "time"), (100, "time")])
    assert [(f["base_offset"], f["broker_deletes"]) for f in rows["orders-0"]["findings"]] == [(0, False), (100, False)]
    assert bases(log_dir / "orders-0") == [200, 300]


def test_rows_of_a_dry_run_while_a_broker_runs_are_marked(run: Run, log_dir: Path) -> None:
    (log_dir / ".kafka_cleanshutdown").unlink()
    (log_dir / "recovery-point-offset-checkpoint").write_text("0\n1\norders 0 100\n")
    with hold([str(log_dir)]):
        status, rows = run_expire(run, log_dir, *older_than(300))
        assert (status, rows["orders-0"]["in_use"], reasons(rows["orders-0"])) == (0, True, [(0, "time")])
        assert "recovery point 100" in rows["orders-0"]["kept"]
        assert rows["users-0"]["status"] == "kept"
        result = run("expire", "--log-dirs", log_dir, *KNOWN, "--execute")
        assert result.exit_code == 1
        assert "in use by" in result.stderr


def test_expire_changes_nothing_while_the_lock_is_held(run: Run, log_dir: Path) -> None:
    (log_dir / ".lock").touch()
    before = snapshot(log_dir)
    with (log_dir / ".lock").open("r+") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        result = run("expire", "--log-dirs", log_dir, *KNOWN, "--execute", "--output", "json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == []
    assert snapshot(log_dir) == before


def test_leftovers_of_an_interrupted_run_are_resolved_first(run: Run, log_dir: Path) -> None:
    flags = older_than(200)
    shutil.copytree(log_dir, log_dir.with_name("right"))
    run_expire(run, log_dir.with_name("right"), *flags, "--execute")
    (log_dir / "log-start-offset-checkpoint").write_text("0\n1\norders 0 200\n")
    log = log_dir / "orders-0" / f"{0:020d}.log"
    log.rename(f"{log}.deleted")
    status, rows = run_expire(run, log_dir, *flags, "--execute")
    assert (status, reasons(rows["orders-0"])) == (0, [(100, "log-start")])
    assert f"removed {log.name}.deleted" in rows["orders-0"]["notes"]
    for name in ("orders-0", "users-0"):
        ours, right = snapshot(log_dir / name), snapshot(log_dir.with_name("right") / name)
        assert {n: data for n, (data, _) in ours.items()} == {n: data for n, (data, _) in right.items()}
    # A broker that was stopped during its own removal leaves orphans and old epochs.
    for name in ("index", "snapshot"):
        (log_dir / "orders-0" / f"{100:020d}.{name}").write_bytes(b"")
    status, rows = run_expire(run, log_dir, *flags, "--execute")
    assert (status, rows["orders-0"]["status"], len(rows["orders-0"]["notes"])) == (0, "kept", 2)
    assert not list((log_dir / "orders-0").glob(f"{100:020d}.*"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--log-dirs", "{tmp}/nowhere"), "no such log dir"),
        (("--log-dirs", "{tmp}/logs", "--topic", "no-such"), "[unknown-topic-or-partition]"),
        (("--log-dirs", "{tmp}/logs", "--master", "local"), "No such option"),
        (("--log-dirs", "{tmp}/logs", "--topic-config", "cleanup.policy=delete"), "cleanup.policy"),
        ((), "[no-log-dirs]"),
    ],
)
def test_wrong_usage_is_refused(run: Run, log_dir: Path, tmp_path: Path, arguments: tuple[str, ...], text: str) -> None:
    result = run("expire", *(argument.format(tmp=tmp_path) for argument in arguments))
    assert result.exit_code == 2
    assert text in result.output
