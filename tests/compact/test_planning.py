from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from keytail import __version__
from keytail.compact.task import CleaningTask
from keytail.run.rows import ResultRow
from tests.command_line import Run, rows_of
from tests.log_dirs import random_records, snapshot, write_log_dir

NO_OTHERS = "--topics-have-no-overrides"
ORDERS = (NO_OTHERS, "--topic-config", "orders:cleanup.policy=compact")
USERS = ("--topic-config", "users:cleanup.policy=compact")
ROW_FIELDS = [
    "topic",
    "partition",
    "log_dir",
    "status",
    "error",
    "slugs",
    "first_dirty_offset",
    "end_dirty_offset",
    "segments_before",
    "segments_after",
    "bytes_before",
    "bytes_after",
    "records_before",
    "records_after",
    "tombstones_removed",
    "markers_removed",
    "start_ms",
    "end_ms",
    "strategy",
    "expected_s",
    "expected_scratch_bytes",
    "removal_limit_offset",
    "removal_limit_replica",
    "prepared",
    "active_segment",
    "batches_before",
    "batches_after",
    "measured",
]


def test_version_is_printed(run: Run) -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"keytail {__version__}\n")


@pytest.mark.parametrize("command", ["plan", "compact"])
def test_help_has_an_example(run: Run, command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"keytail {command} --log-dirs" in result.stdout


def test_a_dry_run_changes_nothing_and_prints_how_to_execute_it(run: Run, log_dir: Path) -> None:
    before = snapshot(log_dir)
    result = run("compact", "--log-dirs", log_dir, *ORDERS, *USERS)
    assert result.exit_code == 0
    assert "Dry run: nothing was changed" in result.stdout
    assert "--execute" in result.stderr
    assert snapshot(log_dir) == before
    assert not (log_dir / ".lock").exists()


def test_json_output_is_only_an_array_of_rows(run: Run, log_dir: Path) -> None:
    result = run("plan", "--log-dirs", log_dir, *ORDERS, *USERS, "--output", "json")
    assert result.exit_code == 0
    rows = json.loads(result.stdout)
    assert [list(row) for row in rows] == [ROW_FIELDS] * 3
    row = rows_of(result)["orders-0"]
    assert row["status"] == "would-compact"
    assert row["log_dir"] == str(log_dir)
    assert (row["first_dirty_offset"], row["end_dirty_offset"]) == (0, 300)
    assert row["segments_before"] == 4
    assert row["bytes_before"] == sum(f.stat().st_size for f in (log_dir / "orders-0").glob("*.log"))


def test_a_topic_whose_overrides_are_unknown_is_refused(run: Run, log_dir: Path) -> None:
    result = run("plan", "--log-dirs", log_dir, *ORDERS, "--output", "json")
    assert result.exit_code == 3
    rows = rows_of(result)
    assert rows["orders-0"]["status"] == "would-compact"
    assert rows["users-0"]["status"] == "refused"
    assert rows["users-0"]["error"].startswith("topic config unknown: no metadata log here: with KRaft the log is in ")
    assert ". Unknown settings of users: cleanup.policy. Give " in rows["users-0"]["error"]


def test_each_setting_that_a_compaction_requires_must_be_known(run: Run, log_dir: Path) -> None:
    """A setting that is given implies nothing about other settings."""
    rests_on = {
        "cleanup.policy": "compact", "delete.retention.ms": "1", "min.compaction.lag.ms": "0",
        "remote.storage.enable": "false", "max.compaction.lag.ms": "9", "min.cleanable.dirty.ratio": "0",
    }  # fmt: skip

    def orders(names: set[str]) -> dict[str, str]:
        words = [word for name in names for word in ("--topic-config", f"orders:{name}={rests_on[name]}")]
        result = run("plan", "--log-dirs", log_dir, *words, "--partitions", "orders-0", "--output", "json")
        return rows_of(result)["orders-0"]

    assert orders({*rests_on})["status"] == "would-compact"
    for name in rests_on:
        row = orders(rests_on.keys() - {name})
        assert (row["status"], f"Unknown settings of orders: {name}. Give" in row["error"]) == ("refused", True), row
    row = orders({"cleanup.policy"})
    assert "--topics-have-no-overrides" in row["error"], "with a known policy, the assertion must be sufficient"


def test_neither_an_assertion_nor_the_brokers_default_gives_a_policy(run: Run, log_dir: Path, tmp_path: Path) -> None:
    properties = tmp_path / "server.properties"
    properties.write_text(f"log.dirs={log_dir}\nlog.cleanup.policy=compact\nsasl.password=secret\n")
    result = run("plan", "--config", properties, NO_OTHERS, "--output", "json")
    assert result.exit_code == 1
    for row in rows_of(result).values():
        assert row["status"] == "refused"
        assert f"Unknown settings of {row['topic']}: cleanup.policy." in row["error"]
        assert NO_OTHERS not in row["error"]


def test_the_offsets_topic_is_compacted_with_the_settings_of_its_creation(run: Run, tmp_path: Path) -> None:
    path = write_log_dir(tmp_path / "logs", {"__consumer_offsets-0": random_records(1, 400)})
    row = rows_of(run("plan", "--log-dirs", path, "--output", "json"))["__consumer_offsets-0"]
    assert (row["status"], "cleanup.policy" in row["error"]) == ("refused", False)
    assert "Unknown settings of __consumer_offsets: delete.retention.ms" in row["error"]
    row = rows_of(run("plan", "--log-dirs", path, NO_OTHERS, "--output", "json"))["__consumer_offsets-0"]
    assert row["status"] == "would-compact"


def test_a_skipped_partition_that_was_named_counts_as_refused(run: Run, log_dir: Path) -> None:
    flags = ("--log-dirs", log_dir, *ORDERS, "--topic-config", "users:cleanup.policy=delete", "--output", "json")
    assert run("plan", *flags).exit_code == 0
    assert run("plan", *flags, "--partitions", "orders-0,users-0").exit_code == 3
    assert run("plan", *flags, "--partitions", "users-0").exit_code == 1


def test_flags_select_partitions(run: Run, log_dir: Path) -> None:
    def chosen(*flags: str) -> list[str]:
        result = run("plan", "--log-dirs", log_dir, *ORDERS, *USERS, *flags, "--output", "json")
        return list(rows_of(result))

    assert chosen("--topic", "ord.*") == ["orders-0", "orders-1"]
    assert chosen("--topic", "ord.*", "--topic", "users") == ["orders-0", "orders-1", "users-0"]
    assert chosen("--topic-list", "users,orders") == ["orders-0", "orders-1", "users-0"]
    assert chosen("--topic-list", "users") == ["users-0"]
    assert chosen("--partitions", "orders-1,users-0") == ["orders-1", "users-0"]
    assert chosen("--topic", "orders", "--partitions", "orders-1") == ["orders-1"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--topic", "order"), "Select from these topics: orders, users"),
        (("--topic", "(orders"), "not a valid regular expression"),
        (("--topic-list", "order"), "Did you mean orders?"),
        (("--partitions", "orders-7"), "Did you mean orders-"),
        (("--topic-config", "orders:cleanup.polcy=compact"), "Did you mean cleanup.policy?"),
        (("--topic-config", "cleanup.policy=compact"), "cleanup.policy requires a topic"),
        (("--config", "/nowhere/server.properties"), "--config cannot be read"),
    ],
)
def test_invalid_values_are_usage_errors(run: Run, log_dir: Path, flags: tuple[str, ...], message: str) -> None:
    result = run("plan", "--log-dirs", log_dir, *flags, "--output", "json")
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stdout == ""


def test_each_of_several_log_dirs_has_its_own_checkpoints(run: Run, log_dir: Path, tmp_path: Path) -> None:
    other = write_log_dir(tmp_path / "other", {"orders-7": random_records(7, 400)})
    (log_dir / "cleaner-offset-checkpoint").write_text("0\n2\norders 0 100\norders 7 200\n")
    (other / "cleaner-offset-checkpoint").write_text("0\n2\norders 0 300\norders 7 150\n")
    for dirs in (f"{log_dir},{other}", f"{other},{log_dir}"):
        rows = rows_of(run("plan", "--log-dirs", dirs, *ORDERS, "--output", "json"))
        found = {name: (row["log_dir"], row["first_dirty_offset"]) for name, row in rows.items()}
        del found["users-0"]
        here = str(log_dir)
        assert found == {"orders-0": (here, 100), "orders-1": (here, 0), "orders-7": (str(other), 150)}


def test_a_partition_in_two_log_dirs_is_refused_in_both(run: Run, log_dir: Path, tmp_path: Path) -> None:
    other = write_log_dir(tmp_path / "other", {"orders-0": random_records(7, 400)})
    result = run("plan", "--log-dirs", f"{log_dir},{other}", *ORDERS, "--output", "json")
    rows = [row for row in json.loads(result.stdout) if row["topic"] == "orders" and row["partition"] == 0]
    assert [row["status"] for row in rows] == ["refused", "refused"]
    assert {row["log_dir"] for row in rows} == {str(log_dir), str(other)}


def test_a_regular_expression_must_match_the_whole_topic(run: Run, log_dir: Path) -> None:
    assert run("plan", "--log-dirs", log_dir, "--topic", "rders").exit_code == 2


@pytest.mark.parametrize(
    ("flag", "right"),
    [("--exeute", "--execute"), ("--log-dir", "--log-dirs"), ("--topics-have-no-override", "--topics-have-no")],
)
def test_the_error_for_an_unknown_flag_suggests_the_nearest_one(run: Run, flag: str, right: str) -> None:
    result = run("compact", flag)
    assert result.exit_code == 2
    assert right in result.stderr
    assert result.stdout == ""


def test_a_missing_log_dir_is_a_usage_error(run: Run) -> None:
    result = run("plan")
    assert result.exit_code == 2
    assert "Give --log-dirs" in result.stderr


def test_directories_that_are_not_log_dirs_are_refused(run: Run, log_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, message in (
        (tmp_path / "absent", "no such log dir"),
        (tmp_path / "empty", "not a log dir: the directory is empty"),
        (tmp_path, "not a log dir"),
        (log_dir / "orders-0", "not a log dir"),
        (log_dir / "meta.properties", "must be a directory"),
    ):
        result = run("plan", "--log-dirs", path)
        assert result.exit_code == 2, path
        assert message in result.stderr
        assert str(path) in result.stderr


def test_without_a_high_watermark_nothing_is_cleaned(run: Run, tmp_path: Path) -> None:
    path = write_log_dir(tmp_path / "logs", {"orders-0": random_records(0, 100)}, high_watermarks=False)
    flags = ("plan", "--log-dirs", path, *ORDERS, "--output", "json")
    refused = run(*flags)
    assert refused.exit_code == 1
    assert "no high watermark" in rows_of(refused)["orders-0"]["error"]
    stated = run(*flags, "--high-watermark", "log-end")
    assert stated.exit_code == 0
    assert rows_of(stated)["orders-0"]["status"] == "would-compact"


def test_a_broken_checkpoint_is_reported_with_its_line(run: Run, log_dir: Path) -> None:
    path = log_dir / "replication-offset-checkpoint"
    path.write_text("0\n1\norders 0 many\n")
    result = run("plan", "--log-dirs", log_dir, *ORDERS, *USERS, "--output", "json")
    assert result.exit_code == 1
    for row in rows_of(result).values():
        assert row["status"] in ("refused", "corrupt")
        assert str(path) in row["error"]
        assert "line 3" in row["error"]


def test_a_time_far_from_the_clock_needs_an_assertion(run: Run, log_dir: Path) -> None:
    before = snapshot(log_dir)
    flags = ("--log-dirs", log_dir, *ORDERS, "--topic-list", "orders", "--now", str(10**12), "--output", "json")
    assert run("compact", *flags).exit_code in (0, 1), "a dry run must accept any time"
    result = run("compact", *flags, "--execute")
    assert result.exit_code == 1
    assert "--unsafe-clock" in result.stderr
    assert json.loads(result.stdout) == []
    assert snapshot(log_dir) == before


def test_force_ignores_only_the_dirty_ratio(run: Run, log_dir: Path) -> None:
    (log_dir / "cleaner-offset-checkpoint").write_text("0\n1\norders 0 200\n")
    flags = ("plan", "--log-dirs", log_dir, *ORDERS, "--partitions", "orders-0", "--output", "json")
    blocked = rows_of(run(*flags))["orders-0"]
    assert blocked["status"] == "skipped"
    assert "dirty ratio" in blocked["error"]
    assert rows_of(run(*flags, "--force"))["orders-0"]["first_dirty_offset"] == 200
    assert rows_of(run(*flags, "--from-log-start"))["orders-0"]["first_dirty_offset"] == 0


@pytest.mark.parametrize(("text", "size"), [("512m", 512 << 20), ("4g", 4 << 30), ("1.5GiB", 3 << 29), ("7", 7)])
def test_sizes_are_parsed(text: str, size: int) -> None:
    from keytail.cli.options import size_bytes

    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "4x", "-1", "g"])
def test_invalid_sizes_are_refused(run: Run, log_dir: Path, text: str) -> None:
    result = run("compact", "--log-dirs", log_dir, f"--map-memory={text}")
    assert result.exit_code == 2


def test_planning_loads_neither_spark_nor_the_compiler(log_dir: Path) -> None:
    code = (
        "import sys; from keytail.main.main import app\n"
        f"app(['plan', '--log-dirs', {str(log_dir)!r}, '--output', 'json'], standalone_mode=False)\n"
        "sys.stderr.write(str(sorted({'pyspark', 'numba', 'lz4', 'zstandard', 'cramjam', 'isal'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(json.loads(done.stdout)) == 3
    assert done.stderr.endswith("[]"), done.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["compact", "--help"], ["verify", "--help"]])
def test_commands_that_read_no_logs_load_no_log_code(arguments: list[str]) -> None:
    code = (
        "import sys; from keytail.main.main import app\n"
        f"app({arguments}, prog_name='keytail', standalone_mode=False)\n"
        "heavy = {'pyspark', 'numba', 'numpy', 'pyarrow', 'javaproperties', 'keytail.log.partition', 'lz4'}\n"
        "sys.stderr.write(str(sorted(heavy & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "keytail" in done.stdout
    assert done.stderr == "[]"


def test_modules_are_not_searched_for_garbage() -> None:
    code = (
        "import atexit, gc, sys\n"
        "atexit.register(lambda: sys.stderr.write(f' {len(gc.get_objects())}'))\n"
        "from keytail.__main__ import main\n"
        "sys.argv[1:] = ['--version']\n"
        "try: main()\n"
        "finally: sys.stderr.write(f'{gc.isenabled()} {len(gc.get_objects()) / gc.get_freeze_count()}')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    enabled, share, at_exit = done.stderr.split()
    assert enabled == "True"
    assert float(share) < 0.5
    assert int(at_exit) < 100


@pytest.mark.parametrize("outside", [-3, 100_000])
def test_a_checkpoint_outside_the_log_is_corrected_if_nothing_is_due(run: Run, log_dir: Path, outside: int) -> None:
    """CONFORMANCE.md 54: the checkpoint is set to the log start offset for any ratio. The entry of a topic that is not
    compacted is retained.
    """
    path = log_dir / "cleaner-offset-checkpoint"
    path.write_text(f"0\n3\norders 0 {outside}\norders 1 400\nusers 0 {outside}\n")
    never_due = ("--topic-config", "orders:min.cleanable.dirty.ratio=1")
    flags = ("compact", "--log-dirs", log_dir, *ORDERS, *never_due, "--topics-have-no-overrides", "--output", "json")
    before = snapshot(log_dir)

    dry = run(*flags)
    row = rows_of(dry)["orders-0"]
    assert row["status"] == "skipped"
    assert f"checkpoint {outside} is outside the log, which has offsets from 0 to 400" in row["error"]
    assert "--execute sets it to 0" in row["error"]
    assert snapshot(log_dir) == before

    done = run(*flags, "--execute")
    assert "it was set to 0" in rows_of(done)["orders-0"]["error"]
    assert path.read_text() == f"0\n3\norders 0 0\norders 1 400\nusers 0 {outside}\n"
    assert snapshot(log_dir).keys() == before.keys()
    for name in before.keys() - {path.name}:
        assert snapshot(log_dir)[name] == before[name]

    assert "checkpoint" not in "".join(row["error"] for row in rows_of(run(*flags)).values())


@pytest.mark.parametrize(
    ("flags", "grouping", "fan_out"),
    [
        ((), "measured", "auto"),
        (("--grouping", "kafka"), "kafka", "auto"),
        (("--fan-out", "never"), "measured", "never"),
    ],
)
def test_grouping_and_fan_out_reach_the_tasks(
    run: Run, log_dir: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], grouping: str, fan_out: str
) -> None:
    from keytail.compact import execution as compaction

    seen: list[CleaningTask] = []

    def compaction_of(_engine: object, tasks: list[CleaningTask], *_: object) -> SimpleNamespace:
        seen.extend(tasks)
        rows = [ResultRow(task.topic, task.partition, task.partition_path, "compacted") for task in tasks]
        return SimpleNamespace(run_or_leave=lambda *_: rows)

    monkeypatch.setattr(compaction, "Compaction", compaction_of)
    assert run("compact", "--log-dirs", log_dir, *ORDERS, *USERS, *flags, "--execute").exit_code == 0
    assert [(task.grouping, task.fan_out) for task in seen] == [(grouping, fan_out)] * 3


def test_a_partition_that_cannot_be_read_is_refused_beside_others_that_are_planned(
    run: Run, log_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a snapshot at the log end, planning reads batches. A disk error then affects only one partition."""
    flags = ("plan", "--log-dirs", str(log_dir), *ORDERS, *USERS, "--output", "json")
    before = rows_of(run(*flags))

    def broken(fs, facts, **_):
        if (facts.topic, facts.partition) == ("orders", 0):
            raise OSError(5, "Input/output error while reading it", f"{facts.path}/x.log")

    monkeypatch.setattr("keytail.log.producers.first_unstable", broken)
    rows = rows_of(run(*flags))
    assert rows["orders-0"]["status"] == "refused"
    assert rows["orders-0"]["error"].startswith("Input/output error while reading it (")
    assert "x.log). The disk or its file system has errors" in rows["orders-0"]["error"]
    del rows["orders-0"], before["orders-0"]
    assert rows == before != {}


def test_assumed_broker_defaults_are_reported(run: Run, tmp_path: Path) -> None:
    log_dir = write_log_dir(tmp_path / "logs", {"orders-0": random_records(1, 200)})
    properties = tmp_path / "server.properties"
    properties.write_text("log.cleaner.delete.retention.ms=604800000\n")
    flags = ["--log-dirs", str(log_dir), "--topic-config", "orders:cleanup.policy=compact", "--force"]
    flags += ["--topics-have-no-overrides", "--topic-config", "min.compaction.lag.ms=0"]

    def printed(*more: str) -> str:
        return run("compact", *flags, *more).stderr

    assert "Kafka's default is assumed for delete.retention.ms (topics: 1)" in printed()
    assert "Kafka's default is assumed" not in printed("--config", str(properties))
    assert "Kafka's default is assumed" not in printed("--topic-config", "orders:delete.retention.ms=1")
