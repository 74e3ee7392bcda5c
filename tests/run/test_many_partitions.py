"""Plans of many partitions have the same rows from several processes as from one, with few operations per partition."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import pytest
from click.testing import Result

from keytail.cli import rows
from keytail.cli.configuration import read_configuration
from keytail.cli.selection import PartitionFilter, select_partitions
from keytail.compact import driver as compaction
from keytail.errors import KeytailError, Refused
from keytail.log.fs import LOCAL
from keytail.run import each_partition
from keytail.run.rows import ResultRow
from keytail.salvage.command import SalvageRow
from keytail.salvage.partition import Loss
from tests.bench.plan import make
from tests.command_line import Run, rows_of
from tests.log.test_listing import Counting

pytestmark = pytest.mark.long

PARTITIONS = 2400
SEGMENTS = 4
MAX_OPERATIONS = 20  # per partition, for any number of segments: listing, epochs, end of the last segment


@pytest.fixture(scope="module")
def log_dirs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make(tmp_path_factory.mktemp("many"), PARTITIONS, SEGMENTS)


def request_of(log_dirs: list[Path], *topic_config: str) -> compaction.Request:
    partition_filter = PartitionFilter(log_dirs=tuple(map(str, log_dirs)))
    return compaction.Request(partition_filter, read_configuration(None, topic_config, True))


def test_several_processes_return_the_same_rows_with_few_operations(
    log_dirs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = [
        f"topic-{number}:cleanup.policy={'delete' if number % 2 else 'compact'}" for number in range(PARTITIONS // 100)
    ]
    request = request_of(log_dirs, *policies, "min.cleanable.dirty.ratio=0.1")
    assert PARTITIONS >= each_partition.MANY
    several = compaction.plan(request)
    fs = Counting()
    item = compaction.plan(request, fs)
    assert [row.name for row in several] == [row.name for row in item]
    assert several == item
    assert {row.status for row in item} == {"would-compact", "skipped"}
    assert {row.strategy for row in item} == {"packed", None}
    assert fs.counts.total() / PARTITIONS < MAX_OPERATIONS


def test_a_row_is_passed_unchanged_from_another_process() -> None:
    names = [field.name for field in dataclasses.fields(ResultRow)]
    row = ResultRow(*range(len(names)))  # type: ignore[arg-type]
    there = pickle.loads(pickle.dumps(dataclasses.replace(row, problem=Refused("why", path="where"))))
    assert str(there.problem) == "why (where)"
    assert [getattr(there, name) for name in names if name != "problem"] == [
        number for number, name in enumerate(names) if name != "problem"
    ]


@pytest.mark.parametrize("most_drawn", [0, 1])
def test_rows_are_printed_as_json_objects(
    most_drawn: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rows, "MAX_DRAWN", most_drawn)
    loss = Loss("damaged", "orders.log", 1, 2, 3, 4, True, "why")
    row = SalvageRow("orders", 0, "logs", "salvaged", losses=(loss,))
    rows.print_json([row])
    reported = {**dataclasses.asdict(row), "slugs": []}
    for name in rows.NOT_IN_JSON:
        reported.pop(name, None)
    assert json.loads(capsys.readouterr().out) == [json.loads(json.dumps(reported))]
    assert reported["losses"][0]["file"] == "orders.log"


def policies(log_dirs: list[Path]) -> tuple[str, str]:
    """Return flags that configure all topics as not compacted."""
    topics = sorted({path.name.rpartition("-")[0] for log_dir in log_dirs for path in log_dir.glob("topic-*")})
    file = log_dirs[0].parent / "topic-configs"
    file.write_text("".join(f"{topic}:cleanup.policy=delete\n" for topic in topics))
    return "--topic-configs", str(file)


def test_many_rows_are_printed_as_table_and_json(log_dirs: list[Path], run: Run) -> None:
    def plan(*more: str) -> Result:
        dirs = ",".join(map(str, log_dirs))
        return run("plan", "--log-dirs", dirs, *policies(log_dirs), *more)

    found = rows_of(plan("--output", "json"))
    assert len(found) == PARTITIONS
    table = plan().stdout
    lines = table.splitlines()
    assert lines[1].split()[:3] == ["partition", "log", "dir"]
    assert sum(" skipped " in line and line.startswith("topic-") for line in lines) >= PARTITIONS
    assert f"{PARTITIONS} partitions: {PARTITIONS} skipped." in table


def test_few_and_many_rows_are_printed_in_the_same_way(
    log_dirs: list[Path], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("plan", "--log-dirs", str(log_dirs[0]), *policies(log_dirs), "--topic", "topic-1")
    few_json, few = run(*flags, "--output", "json").stdout, run(*flags).stdout
    monkeypatch.setattr(rows, "MAX_DRAWN", 1)
    assert json.loads(run(*flags, "--output", "json").stdout) == json.loads(few_json)
    many = run(*flags).stdout
    assert [line.split() for line in many.splitlines()] == [line.split() for line in few.splitlines()]


def test_failures_in_a_process_are_reported(log_dirs: list[Path]) -> None:
    chosen = select_partitions(LOCAL, PartitionFilter(log_dirs=tuple(map(str, log_dirs))))

    def fail(log_dir: object, entry: object) -> int:
        raise ZeroDivisionError("an oversight")

    with pytest.raises(KeytailError, match="an oversight"):
        each_partition.of_each(chosen.partitions, fail)


@pytest.mark.parametrize("setting", ["min.compaction.lag.ms=86400000", "max.compaction.lag.ms=86400000"])
def test_lag_settings_use_the_times_of_indexes_and_batches(
    setting: str, log_dirs: list[Path], run: Run
) -> None:
    """The records are years old, although their files are new."""
    flags = ["--log-dirs", str(log_dirs[0]), "--topics-have-no-overrides", "--partitions", "topic-1-0"]
    ratio = "1.0" if setting.startswith("max") else "0.1"
    policy = ["topic-1:cleanup.policy=compact", setting, f"min.cleanable.dirty.ratio={ratio}"]
    more = [flag for text in policy for flag in ("--topic-config", text)]
    for command, due in (("plan", "would-compact"), ("describe", True)):
        [row] = rows_of(run(command, *flags, *more, "--output", "json")).values()
        assert row["status" if command == "plan" else "eligible"] == due, row
