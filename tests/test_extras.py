"""Without the packages of an extra, all other commands run, and those that need it print the line that installs it.

Each run is a child process in which the packages cannot be imported. tests/test_release.py installs the core alone.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from keytail.extras import AVRO, DELTA, EXTRAS, HISTORY, OBJECT_STORE, REPORT, SPARK, require
from tests import golden
from tests.command_line import Run
from tests.log_dirs import random_records, snapshot, write_log_dir

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
MODULES = ("pyspark", "py4j", "delta", "pyarrow", "pandas", "deltalake", "fastavro", "jinja2", "markupsafe")
SETTINGS = ("--topic-config", "orders:cleanup.policy=compact", "--topics-have-no-overrides")

# Runs command lines one after the other, in a process that cannot import the modules. Prints [status, stdout, stderr].
_CHILD = """
import contextlib, io, json, os, sys, tempfile
sys.modules.update(dict.fromkeys(json.loads(sys.argv[1])))
from keytail.main.main import main
for arguments in json.loads(sys.argv[2]):
    status, texts = None, []
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        kept = [os.dup(1), os.dup(2)]
        os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
        try:
            main(arguments)
        except SystemExit as ended:
            status = ended.code
        except BaseException as problem:
            status = repr(problem)
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            for number, fd in zip((1, 2), kept):
                os.dup2(fd, number), os.close(fd)
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    print(json.dumps([status, *texts]))
"""


@dataclass(frozen=True)
class Ended:
    """The result of a command."""

    status: Any
    stdout: str
    stderr: str


def run_without(modules: Sequence[str], *commands: Sequence[str | Path]) -> list[Ended]:
    """Run command lines in one process that has none of the modules."""
    lines = json.dumps([[str(word) for word in command] for command in commands])
    child = [sys.executable, "-c", _CHILD, json.dumps(modules), lines]
    done = subprocess.run(child, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [Ended(*json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def core() -> Iterator[Any]:
    return partial(run_without, MODULES)


def test_all_commands_without_spark_need_no_extra(core: Any, tmp_path: Path) -> None:
    """The commands run on a real broker's logs, in an order in which they could be run on a stopped broker."""
    golden.unpack(tmp_path)
    logs, other = tmp_path / "kafka-logs", tmp_path / "other"
    shutil.copytree(logs, other)
    config = ("--config", tmp_path / "server.properties", "--topic-list", "zstd,gzip,none")
    [segment, *_] = sorted(logs.glob("zstd-0/*.log"))
    (tmp_path / "keys").write_text("user-00002\n")
    commands = {
        "describe": ("describe", *config),
        "lookup": ("lookup", *config, "--offset", "3"),
        "dump": ("dump", "--files", segment),
        "plan": ("plan", *config),
        "audit": ("audit", "--replica", f"a={logs}", "--replica", f"b={other}", "--topic-list", "zstd"),
        "out of place": ("compact", *config, "--output-dir", tmp_path / "target", "--execute"),
        "compact": ("compact", *config, "--keep-originals", tmp_path / "backup", "--execute"),
        "verify": ("verify", *config),
        "undo": ("undo", "--originals", tmp_path / "backup", "--list"),
        "rebuild": ("rebuild-index", *config, "--all", "--execute"),
        "expire": ("expire", *config, "--execute"),
        "erase": ("erase", *config, "--keys-file", tmp_path / "keys", "--execute"),
        "salvage": ("salvage", *config, "--to", tmp_path / "saved", "--execute"),
        "doctor": ("doctor", *config[:2]),
    }
    for name, ended in zip(commands, core(*commands.values()), strict=True):
        assert ended.status == 0, (name, ended)
        assert ended.stdout, name
        assert "Traceback" not in ended.stderr, (name, ended.stderr)


def test_work_of_any_size_is_done_by_child_processes(core: Any, tmp_path: Path) -> None:
    """If Spark were installed, it would be started: the partition may have more keys than the map."""
    logs = write_log_dir(tmp_path / "logs", {"orders-0": random_records(1, 4000)})
    flags = ("--log-dirs", logs, *SETTINGS, "--force", "--map-memory", "64k", "--output", "json", "--execute")
    [ended] = core(("compact", *flags))
    assert ended.status == 0, ended
    assert [row["status"] for row in json.loads(ended.stdout)] == ["compacted"]
    assert "Spark is not installed: a partition with more keys" in ended.stderr
    assert SPARK.install in ended.stderr
    assert "running without Spark: " in ended.stderr


def test_commands_that_need_an_extra_print_the_line_that_installs_it(core: Any, tmp_path: Path) -> None:
    logs = write_log_dir(tmp_path / "logs", {"orders-0": random_records(1, 400)})
    (tmp_path / "schema").write_text('"string"')
    schema = ("--value-format", "avro", "--value-schema", f"1={tmp_path / 'schema'}")
    keys = ("--keys-file", tmp_path / "schema", "--key-format", "avro", "--key-schema", tmp_path / "schema")
    of, execute = ("--log-dirs", logs, *SETTINGS), ("--ledger", tmp_path / "ledger", "--execute")
    config = tmp_path / "server.properties"
    config.write_text(f"log.dirs={logs}\n")
    cases: list[tuple[Any, str, tuple[str | Path, ...]]] = [
        (SPARK, "--master", ("compact", *of, "--master", "local[1]", "--execute")),
        (SPARK, "--master", ("verify", "--log-dirs", logs, "--master", "local[1]")),
        (SPARK, "--master", ("rebuild-index", "--log-dirs", logs, "--master", "local[1]", "--execute")),
        (SPARK, "--master", ("audit", "--replica", logs, "--replica", logs, "--master", "local[1]")),
        (SPARK, "--fan-out always", ("compact", *of, "--fan-out", "always", "--execute")),
        (SPARK, "import", ("import", tmp_path / "table", "--topic", "orders", "--log-dirs", logs, "--execute")),
        (DELTA, "--format delta", ("import", tmp_path / "table", "--format", "delta", "--topic", "orders", *of[:2])),
        (HISTORY, "--ledger", ("compact", *of, *execute)),
        (HISTORY, "--ledger", ("rebuild-index", "--log-dirs", logs, *execute)),
        (HISTORY, "--ledger", ("expire", *of, *execute)),
        (DELTA, "--ledger", ("compact", *of, "--ledger", "s3a://bucket/ledger", "--execute")),
        (DELTA, "export", ("export", "--log-dirs", logs, "--to", tmp_path / "tables")),
        (DELTA, "--maintain", ("history", "--ledger", tmp_path / "ledger", "--maintain")),
        (HISTORY, "history", ("history", "--ledger", tmp_path / "ledger")),
        (AVRO, "--value-schema: Avro", ("export", "--log-dirs", logs, "--to", tmp_path / "tables", *schema)),
        (AVRO, "--key-format avro", ("erase", "--log-dirs", logs, "--topic", "orders", *keys)),
        (OBJECT_STORE, "--output-dir s3://b/k", ("compact", *of, "--output-dir", "s3://b/k", "--execute")),
        (REPORT, "--report", ("compact", *of, "--execute", "--report", tmp_path / "page.html")),
        (REPORT, "report", ("report", tmp_path / "page.html", "--ledger", tmp_path / "ledger")),
    ]
    before = snapshot(tmp_path)
    for (extra, for_what, command), ended in zip(cases, core(*(case[2] for case in cases)), strict=True):
        assert (ended.status, ended.stdout) == (2, ""), (command, ended)
        assert ended.stderr.startswith(f"keytail: {for_what} "), (command, ended.stderr)
        assert f"not installed: {', '.join(extra.packages)}" in " ".join(ended.stderr.split()), (command, ended.stderr)
        text = " ".join(ended.stderr.split())
        assert f"With the pip of keytail's environment, run: {extra.install}; or, if keytail was installed" in text
        assert f"pip install -c conf/constraints.txt '.[{extra.name}]'" in text
    assert snapshot(tmp_path) == before


def test_a_large_partition_is_not_audited_without_spark(tmp_path: Path, run: Run, monkeypatch: Any) -> None:
    logs = write_log_dir(tmp_path / "logs", {"orders-0": random_records(1, 400)})
    other = shutil.copytree(logs, tmp_path / "other")
    monkeypatch.setattr("keytail.audit.driver.ALONE_BYTES", 1 << 10)
    monkeypatch.setitem(sys.modules, "pyspark", None)
    result = run("audit", "--replica", f"a={logs}", "--replica", f"b={other}")
    assert result.exit_code == 2
    assert "audit of partitions with more than 1.0 KiB in all replicas needs" in result.stderr
    assert SPARK.install in result.stderr


def test_doctor_checks_each_extra(core: Any, tmp_path: Path) -> None:
    [ended, with_master] = core(
        ("doctor", "--output", "json"), ("doctor", "--master", "local[1]", "--output", "json")
    )
    rows = {row["check"]: row for row in json.loads(ended.stdout)}
    assert ended.status == 0, ended
    checks = {"Spark": SPARK, "Delta's jars": DELTA}
    for extra in EXTRAS:
        check = next((check for check, of in checks.items() if of is extra), f"keytail[{extra.name}]")
        assert rows[check]["status"] == "ok"
        assert rows[check]["found"] == f"not installed; {extra.install} adds {extra.adds}"
    [failed] = [row for row in json.loads(with_master.stdout) if row["status"] == "fail"]
    assert (with_master.status, failed["check"]) == (1, "executors of local[1]")
    assert SPARK.install in failed["remedy"]


def test_doctor_warns_if_only_a_part_of_an_extra_is_installed() -> None:
    [ended] = run_without(("pyarrow",), ("doctor", "--output", "json"))
    rows = {row["check"]: row for row in json.loads(ended.stdout)}
    assert (rows["Spark"]["status"], rows["Spark"]["remedy"]) == ("warn", f"Run {SPARK.install}")
    assert rows["keytail[object-store]"]["status"] == "ok"


def test_doctor_needs_no_java_without_spark(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", "/nowhere")

    def java() -> dict[str, Any]:
        [row] = [row for row in json.loads(run("doctor", "--output", "json").stdout) if row["check"] == "Java"]
        return row

    assert java()["status"] == "fail"
    monkeypatch.setitem(sys.modules, "pyspark", None)
    assert (row := java())["status"] == "ok"
    assert "only Spark needs Java" in row["found"]


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda extra: extra.name)
def test_an_extra_has_the_packages_of_its_modules(extra: Any) -> None:
    """The extra requires exactly these packages, and none of them is missing in this environment."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    brought = {_name(item) for item in optional[extra.name]}
    if "keytail[spark]" in brought:
        brought = brought - {"keytail[spark]"} | {_name(item) for item in optional["spark"]}
    assert brought == set(extra.packages)
    assert not set(extra.packages) & set(map(_name, project["dependencies"]))
    assert extra.missing() == []
    require("this test", extra)


def test_the_extra_all_has_all_packages() -> None:
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert optional.keys() == {"all", "test", "mutation", *(extra.name for extra in EXTRAS)}
    assert optional["all"] == [f"keytail[{','.join(sorted(extra.name for extra in EXTRAS))}]"]
    assert "keytail[all]" in optional["test"]


def _name(requirement: str) -> str:
    return re.split("[=<]", requirement)[0]
