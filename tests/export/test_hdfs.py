"""Tables and ledgers in HDFS: the client of a real Spark, and a real NameNode and DataNode on 127.0.0.1."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keytail.ledger.read import read_rows
from tests.chance import SEED
from tests.command_line import Run
from tests.export.hdfs_server import Hdfs, hdfs_server
from tests.export.test_object_store import Meetings, grow, model, rows_at
from tests.growing_log import GrowingLog
from tests.proxy import Proxy
from tests.run.shared import lend_session

pytestmark = [
    pytest.mark.spark,
    pytest.mark.soak("tests/export/test_object_store.py; tests/run/spark/test_stores.py has the refusals"),
]

# Few and quick retries, since the server is near.
QUICK = {"ipc.client.connect.max.retries": "1", "ipc.client.connect.retry.interval": "50"}

# A request to rename a file to the name of a commit, other than the first of a table.
COMMIT = rb"\x07rename2.*?(/\w+/_delta_log/(?!0{20})\d{20}\.json)(?!\.)"


@pytest.fixture(scope="module")
def hdfs(spark: Any) -> Iterator[Hdfs]:
    for name, value in QUICK.items():
        spark.sparkContext._jsc.hadoopConfiguration().set(name, value)
    with hdfs_server() as server:
        yield server


@pytest.fixture(autouse=True)
def one_session(hdfs: Hdfs, monkeypatch: pytest.MonkeyPatch) -> None:
    lend_session(monkeypatch)


@pytest.fixture
def log(tmp_path: Path) -> GrowingLog:
    made = GrowingLog(random.Random(SEED), tmp_path / "logs")
    grow(made)
    return made


def test_commands_use_tables_and_a_ledger_in_hdfs(
    hdfs: Hdfs, log: GrowingLog, run: Run, tmp_path: Path, spark: Any
) -> None:
    """Dry, full and incremental exports, a NameNode that is lost at a commit, one that is down, and a ledger."""
    lake = f"hdfs://127.0.0.1:{hdfs.port}/lake"
    ledger = ("--ledger", f"{lake}/ledger")
    compact = ("compact", "--log-dirs", log.log_dir, "--topics-have-no-overrides", *ledger, "--execute")
    compact += ("--topic-config", "t:cleanup.policy=compact")

    def rows(*command: str | Path, exit_code: int = 0) -> list[dict[str, Any]]:
        result = run(*command, "--output", "json")
        assert result.exit_code == exit_code, result.output
        found = json.loads(result.stdout)
        return list(found if isinstance(found, list) else found["rows"])

    def exported(*flags: str, exit_code: int = 0, to: str = lake) -> dict[str, Any]:
        [row] = rows("export", "--log-dirs", log.log_dir, "--to", to, *flags, exit_code=exit_code)
        return row

    assert exported()["status"] == "would-export"
    for way in ("full", "incremental"):
        row = exported("--execute")
        assert (row["status"], row["strategy"], row["table"]) == ("exported", way, f"{lake}/t")
        assert rows_at(spark, f"{lake}/t") == model(log)
        assert exported()["status"] == "clean"
        grow(log)

    proxy = Proxy(hdfs.port)
    proxy.on_request = lambda sent: "break" if re.search(COMMIT, sent, re.DOTALL) else "pass"
    row = exported("--execute", exit_code=1, to=f"hdfs://127.0.0.1:{proxy.port}/lake")
    proxy.close()
    assert (row["status"], row["slugs"], proxy.is_down) == ("failed", ["table-not-written"], True)

    hdfs.stop("namenode")
    for flags in ((), ("--execute",)):
        row = exported(*flags, exit_code=1)
        assert (row["status"], row["slugs"]) == ("failed", ["table-not-readable"])
    for command, slug in ((("history", *ledger), "unreadable-ledger"), (compact, "unwritable-ledger")):
        result = run(*command)
        assert result.exit_code != 0 and "Exception" in result.output and f"[{slug}]" in result.output
    hdfs.start("namenode")
    hdfs.wait_until_ready()
    assert exported("--execute")["strategy"] == "incremental"
    assert rows_at(spark, f"{lake}/t") == model(log)

    for _ in range(2):
        rows(*compact)
    runs = rows("history", *ledger)
    assert [item["status"] for item in runs] == ["done", "done"]
    assert {item["status"] for item in rows("history", *ledger, "--maintain", "--execute")} == {"maintained"}
    page = tmp_path / "page.html"
    shown = run("report", page, *ledger, "--run", runs[0]["run_id"])
    assert shown.exit_code == 0, shown.output
    assert runs[0]["run_id"] in page.read_text()


def test_two_drivers_that_always_commit_at_once_lose_nothing(hdfs: Hdfs, spark: Any) -> None:
    """The NameNode renames a file to the commit's name unless that name exists."""
    meetings, each, proxy = Meetings(COMMIT), 6, Proxy(hdfs.port)
    proxy.on_request = meetings.on_request
    uri = f"hdfs://127.0.0.1:{proxy.port}/both"
    try:
        for name in ("a", "b"):
            command = [sys.executable, "-m", "tests.export.s3_driver", uri, name, str(each), "{}"]
            meetings.drivers.append(subprocess.Popen(command))
        assert [driver.wait() for driver in meetings.drivers] == [0, 0]
    finally:
        proxy.close()
    rows = read_rows(f"hdfs://127.0.0.1:{hdfs.port}/both", "runs", {}, spark)
    assert sorted(row["run_id"] for row in rows) == sorted(f"{name}-{n}" for name in "ab" for n in range(each))
    assert len(meetings.met) > each
