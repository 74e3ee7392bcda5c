"""The public interface `keytail.api`: its names and signatures, the examples of its docstrings, and its results, which
are compared with those of the commands and of the Spark source."""

from __future__ import annotations

import contextlib
import doctest
import inspect
import io
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from keytail import api
from keytail.cli.rows import write_json
from keytail.log.fs import LOCAL
from keytail.source.column_types import OF_BATCHES, OF_RECORDS
from keytail.source.columns import arrow_schema, record_batches
from keytail.source.options import parse_options
from keytail.source.plan import plan_read
from tests.api.interface import RECORDED, interface
from tests.chance import SEED
from tests.command_line import Run
from tests.growing_log import GrowingLog
from tests.log_dirs import BASE_MS, snapshot, write_log_dir
from tests.reference.batches import Rec

COMPACTED = ("orders:cleanup.policy=compact", "users:cleanup.policy=compact")


def _records(count: int) -> list[Rec]:
    return [Rec(n, BASE_MS + n, b"key-%d" % (n % 4), b"%d" % n) for n in range(count)]


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the log dir of the examples."""
    partitions = {"orders-0": _records(100), "orders-1": _records(100), "users-0": _records(40)}
    return write_log_dir(tmp_path_factory.mktemp("api") / "logs", partitions)


@pytest.fixture
def logs(log_dir: Path) -> Iterator[api.LogDirs]:
    before = snapshot(log_dir)
    yield api.open_log_dirs(str(log_dir), topic_config=COMPACTED, topics_have_no_overrides=True)
    assert snapshot(log_dir) == before


def test_names_and_signatures_are_those_that_were_promised() -> None:
    """If this fails by intention: tests/api/interface.py."""
    assert interface() == RECORDED.read_text()


def test_all_other_names_are_private() -> None:
    """Each name of the package, and of its classes, is exported or begins with an underscore."""
    public = [name for name in vars(api) if not name.startswith("_")]
    assert sorted(public) == sorted(api.__all__)
    modules = [path.name for path in Path(api.__file__).parent.glob("*.py")]
    assert modules and all(name.startswith("_") for name in modules)


def test_every_public_name_has_a_description() -> None:
    for name in api.__all__:
        item = getattr(api, name)
        if inspect.isclass(item) or inspect.isfunction(item):
            assert item.__doc__, name
    for name, method in vars(api.LogDirs).items():
        if not name.startswith("_") and inspect.isfunction(method):
            assert method.__doc__, name


def test_the_examples_of_the_docstrings_are_true(log_dir: Path) -> None:
    runner, failed = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS), {}
    for name, item in {"api": api, **{name: getattr(api, name) for name in ("LogDirs", "open_log_dirs")}}.items():
        names = {**vars(api), "log_dir": str(log_dir)}
        for test in doctest.DocTestFinder().find(item, name, globs=names):
            if test.examples:
                failed[test.name] = runner.run(test).failed
    assert failed == dict.fromkeys(failed, 0)
    assert {"api", "open_log_dirs", *(f"LogDirs.{name}" for name in _methods())} == failed.keys()


def test_the_code_of_the_guide_prints_what_the_page_shows(
    log_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(api.__file__).parents[1] / "guide/notebook.md").read_text()
    [code], [shown] = (re.findall(rf"^```{kind}\n(.*?)^```$", page, re.M | re.S) for kind in ("python", "text"))
    exec(compile(code, "notebook.md", "exec"), {"log_dir": str(log_dir)})
    assert capsys.readouterr().out == shown


def _methods() -> list[str]:
    """Return the methods that need an example; that of `partitions` is the first of the module."""
    public = [name for name, item in vars(api.LogDirs).items() if name[0] != "_" and inspect.isfunction(item)]
    return [name for name in public if name != "partitions"]


@pytest.mark.long
def test_neither_spark_nor_arrow_is_imported(log_dir: Path) -> None:
    """pyarrow is imported by `read` and `read_batches` only."""
    code = f"""
import sys
from keytail import api
logs = api.open_log_dirs({str(log_dir)!r}, topic_config={COMPACTED!r})
print("numba" in sys.modules, "pyarrow" in sys.modules)
logs.describe(), logs.plan(force=True), logs.lookup(3)
print("pyarrow" in sys.modules)
print(logs.read(columns=["offset"]).num_rows, "pyspark" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "False", "240", "False"]


def _fields(rows: list[Any]) -> list[dict[str, Any]]:
    file = io.StringIO()
    write_json(rows, file)
    return json.loads(file.getvalue())


CASES = {
    "describe": (lambda logs: logs.describe(every_setting=True, count_records=True), ("--all", "--records")),
    "lookup": (lambda logs: logs.lookup(17, explain=True), ("--offset", "17", "--explain")),
    "plan": (lambda logs: logs.plan(force=True, from_log_start=True), ("--force", "--from-log-start")),
}


@pytest.mark.parametrize("command", CASES)
def test_rows_are_those_of_the_command(command: str, logs: api.LogDirs, run: Run) -> None:
    method, flags = CASES[command]
    settings = []
    if command != "lookup":
        settings = ["--topics-have-no-overrides", *(f"--topic-config={item}" for item in COMPACTED)]
    result = run(command, "--log-dirs", *logs.paths, *settings, *flags, "--output", "json")
    rows = method(logs)
    assert _fields(rows) == json.loads(result.stdout)
    assert [api.fields_of(row)["topic"] for row in rows] == ["orders", "orders", "users"]


def test_a_time_is_looked_up_as_by_the_command(logs: api.LogDirs, run: Run) -> None:
    time = datetime.fromtimestamp(BASE_MS / 1000, UTC) + timedelta(milliseconds=77)
    result = run("lookup", "--log-dirs", *logs.paths, "--timestamp", str(BASE_MS + 77), "--output", "json")
    assert _fields(logs.lookup(time)) == json.loads(result.stdout)
    east = time.astimezone(datetime.strptime("+0530", "%z").tzinfo)
    assert [row.offset for row in logs.lookup(east)] == [77, 77, None]


def test_records_are_those_of_the_spark_source(tmp_path: Path) -> None:
    """Random logs with transactions, all codecs, old formats and headers, by both isolation levels."""
    rng = random.Random(SEED)
    made = [GrowingLog(rng, tmp_path / "logs", topic=topic) for topic in ("a", "b")]
    for log in made:
        log.grow(20, old=log.topic == "b")
        log.grow(60)
        log.write()
    logs = api.open_log_dirs(str(tmp_path / "logs"))
    for level in ("read_uncommitted", "read_committed"):
        options = {"logDirs": str(tmp_path / "logs"), "topicPattern": ".*", "isolationLevel": level}
        asked = parse_options(options | {"includeHeaders": "true"})
        schema = arrow_schema(OF_RECORDS)
        batches = [batch for share in plan_read(LOCAL, asked) for batch in record_batches(LOCAL, share, schema)]
        expected = pyarrow.Table.from_batches(batches, schema)
        table = logs.read(isolation_level=level, include_headers=True)
        assert table.equals(expected)
        # A transaction that is open from the start leaves few records below the last stable offset.
        assert table.num_rows > (100 if level == "read_uncommitted" else 0)
        for log in made:
            offsets = logs.select(topics=log.topic).read(isolation_level=level).column("offset").to_pylist()
            committed = level == "read_committed"
            end = log.stable if committed else log.end
            wanted = [item.record.offset for item in log._appended if not (committed and item.aborted)]
            assert offsets == [offset for offset in wanted if offset < end]


def test_types_are_those_that_spark_derives() -> None:
    from pyspark.sql.pandas.types import to_arrow_schema

    from keytail.source.schema import BATCH_COLUMNS, RECORD_COLUMNS, schema_of

    for columns, of_spark in ((OF_RECORDS, RECORD_COLUMNS), (OF_BATCHES, BATCH_COLUMNS)):
        assert arrow_schema(columns) == to_arrow_schema(schema_of(of_spark, None), timezone="UTC")


def test_positions_limit_what_is_read(logs: api.LogDirs) -> None:
    time = datetime.fromtimestamp(BASE_MS / 1000, UTC) + timedelta(milliseconds=90)
    one = logs.select(partitions="orders-1")

    def offsets(of: api.LogDirs, *positions: Any, **more: Any) -> list[int]:
        return of.read(*positions, columns=["offset"], **more).column("offset").to_pylist()

    assert offsets(one, 95) == [95, 96, 97, 98, 99]
    assert offsets(one, np.int64(95), np.int64(97)) == [95, 96]
    assert offsets(one, time, 92) == [90, 91]
    assert offsets(one, end={"orders-1": 2}) == [0, 1]
    assert offsets(logs, {"orders-0": 98, "orders-1": 99, "users-0": 39}) == [98, 99, 99, 39]
    assert offsets(logs, time) == [*range(90, 100)] * 2, "users-0 has no record at or after that time"
    assert list(logs.read_batches(100)) == []


def _refused(logs: api.LogDirs) -> dict[str, Any]:
    return {
        "invalid-argument position": lambda: logs.lookup(-1),
        "invalid-argument position bool": lambda: logs.lookup(True),
        "invalid-argument position text": lambda: logs.lookup("3"),  # type: ignore[arg-type]
        "invalid-argument position naive": lambda: logs.lookup(datetime(2024, 1, 1)),
        "time-out-of-range": lambda: logs.lookup(datetime(1960, 1, 1, tzinfo=UTC)),
        "invalid-argument topics": lambda: logs.select(topics=[]),
        "invalid-argument partitions": lambda: logs.select(partitions=[3]),  # type: ignore[list-item]
        "unknown-topic-or-partition": lambda: logs.select(topics="order"),
        "no-partition-matches": lambda: logs.select(topics="users", partitions="orders-0"),
        "unknown-column": lambda: logs.read(columns=["offset", "size"]),
        "unknown-column headers": lambda: logs.read(columns=["headers"]),
        "empty-option": lambda: logs.read(columns=[]),
        "invalid-argument start": lambda: logs.read({"orders": 3}),
        "invalid-argument start kinds": lambda: logs.read({"a-0": 3, "b-0": datetime(2024, 1, 1, tzinfo=UTC)}),
        "invalid-argument end": lambda: logs.read(end={}),
        "offsets-partition-mismatch": lambda: logs.read({"orders-0": 3}),
        "offset-after-readable-end": lambda: logs.read(end=101),
        "invalid-argument isolation_level": lambda: logs.read(isolation_level="committed"),  # type: ignore[arg-type]
        "invalid-argument high_watermark": lambda: logs.plan(high_watermark="end"),  # type: ignore[arg-type]
        "invalid-argument high_watermark of describe": lambda: logs.describe(high_watermark=""),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("case", _refused(api.LogDirs(())))
def test_invalid_arguments_are_refused(case: str, logs: api.LogDirs) -> None:
    with pytest.raises(api.UsageProblem) as raised:
        _refused(logs)[case]()
    slug, _, argument = case.partition(" ")
    assert raised.value.slug == slug
    assert argument.split(" ")[0] in str(raised.value)


def test_invalid_arguments_are_refused_before_the_first_batch(logs: api.LogDirs) -> None:
    with pytest.raises(api.UsageProblem):
        logs.read_batches(columns=["size"])


def test_damage_is_in_the_row_and_ends_a_read(tmp_path: Path) -> None:
    log_dir = write_log_dir(tmp_path / "logs", {"orders-0": _records(100), "users-0": _records(40)})
    path = log_dir / "orders-0" / f"{50:020d}.log"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    logs = api.open_log_dirs([str(log_dir)])
    assert [row.status for row in logs.lookup(55)] == ["corrupt", "out-of-range"]
    assert logs.read(end=30, columns=["offset"]).num_rows == 60
    with pytest.raises(api.CorruptLog) as raised:
        logs.read()
    assert raised.value.path == str(path)


def test_a_partition_without_a_high_watermark_is_refused(tmp_path: Path) -> None:
    log_dir = write_log_dir(tmp_path / "logs", {"t-0": _records(40)}, high_watermarks=False)
    logs = api.open_log_dirs(str(log_dir))
    with pytest.raises(api.Refused) as raised:
        logs.read()
    assert raised.value.slug == "no-high-watermark"
    assert logs.read(high_watermark="log-end").num_rows == 40


def test_an_error_of_the_system_is_an_error_of_keytail(
    logs: api.LogDirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "/x")

    monkeypatch.setattr("keytail.api._log_dirs.select_partitions", fail)
    with pytest.raises(api.KeytailError) as raised:
        logs.partitions()
    assert (raised.value.slug, raised.value.path) == ("permission-denied", "/x")


def test_the_callers_code_does_not_run_as_the_owner(logs: api.LogDirs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two batches, the process has its own user and output style again."""
    inside: list[bool] = []

    @contextlib.contextmanager
    def working_as(_: object) -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    monkeypatch.setattr("keytail.api._log_dirs.working_as", working_as)
    for _ in logs.read_batches(columns=["offset"]):
        assert not inside


def test_pyarrow_is_named_if_it_is_missing(logs: api.LogDirs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keytail.extras.Extra.missing", lambda _: ["pyarrow"])
    for call in (logs.read, logs.read_batches):
        with pytest.raises(api.MissingExtra, match=re.escape("pip install 'keytail[arrow]'")):
            call()


def test_only_warnings_are_printed(logs: api.LogDirs, capsys: pytest.CaptureFixture[str]) -> None:
    logs.describe()
    logs.plan()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert all("keytail: " in line for line in captured.err.splitlines())
    assert "Kafka's default is assumed" not in captured.err
