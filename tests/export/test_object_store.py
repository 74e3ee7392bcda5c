"""Tables and ledgers in an object store: Spark's own S3A, and an S3 server on 127.0.0.1 behind a proxy."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from keytail.cli.selection import PartitionFilter
from keytail.errors import KeytailError
from keytail.export.command import ExportRow, Request
from keytail.export.driver import export
from keytail.export.formats import Formats
from keytail.ledger.read import read_rows
from keytail.ledger.write import Ledger
from keytail.run.spark.engine import SparkEngine
from keytail.run.spark.stores import require_store
from tests.chance import SEED
from tests.command_line import Run
from tests.compact.out_of_place.s3_server import ACCESS_KEY, SECRET_KEY, S3Server, s3_server
from tests.export.test_driver import expected, statuses
from tests.growing_log import GrowingLog
from tests.proxy import Action, Proxy
from tests.run.shared import lend_session

pytestmark = pytest.mark.spark

LAKE = "s3a://lake"
COVERED = "test_a_commit_is_neither_replaced_nor_repeated; tests/run/spark/test_stores.py has the refusals"
# Few and quick retries, since the server is near.
S3A = {
    "fs.s3a.path.style.access": "true",
    "fs.s3a.endpoint.region": "us-east-1",
    "fs.s3a.attempts.maximum": "1",
    "fs.s3a.retry.limit": "1",
    "fs.s3a.retry.interval": "50ms",
    "fs.s3a.retry.throttle.limit": "1",
}


@dataclass(frozen=True)
class Store:
    server: S3Server
    proxy: Proxy
    session: Any

    def engine(self) -> SparkEngine:
        return SparkEngine(self.session)

    def on_put(self, part: str, action: Action, before: Callable[[], Any] = lambda: None) -> None:
        """At the next request that writes an object whose key contains `part`, call `before` and do `action`."""

        def on_request(sent: bytes) -> Action:
            if not sent.startswith(b"PUT ") or part.encode() not in sent.partition(b"\r\n")[0]:
                return "pass"
            self.proxy.on_request = lambda sent: "pass"
            before()
            return action

        self.proxy.on_request = on_request


@pytest.fixture(scope="module")
def store(spark: Any) -> Iterator[Store]:
    with s3_server() as server:
        proxy = Proxy(server.port)
        server.client().create_bucket(Bucket="lake")
        address = {"fs.s3a.endpoint": f"http://127.0.0.1:{proxy.port}"}
        keys = {"fs.s3a.access.key": ACCESS_KEY, "fs.s3a.secret.key": SECRET_KEY}
        for name, value in {**S3A, **address, **keys}.items():
            spark.sparkContext._jsc.hadoopConfiguration().set(name, value)
        try:
            yield Store(server, proxy, spark)
        finally:
            proxy.close()


@pytest.fixture(autouse=True)
def one_session(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    lend_session(monkeypatch)
    yield
    store.proxy.restore()


@pytest.fixture
def log(tmp_path: Path) -> GrowingLog:
    made = GrowingLog(random.Random(SEED), tmp_path / "logs")
    grow(made)
    return made


def grow(log: GrowingLog) -> None:
    log.append_records(log.random_records(5))
    log.grow(10)
    log.settle()
    log.append_records(log.random_records(3))
    log.write()


def exported(log: GrowingLog, name: str, **flags: Any) -> list[ExportRow]:
    partition_filter = PartitionFilter(log_dirs=(str(log.log_dir),))
    return export(Request(partition_filter, f"{LAKE}/{name}", Formats(), **{"execute": True, **flags}))


def table(store: Store, name: str) -> set[tuple[Any, ...]]:
    return rows_at(store.session, f"{LAKE}/{name}/t")


def rows_at(session: Any, uri: str) -> set[tuple[Any, ...]]:
    frame = session.read.format("delta").load(uri)
    rows = frame.selectExpr("partition", "key", "value", "offset").collect()
    return {(row.partition, bytes(row.key or b""), bytes(row.value or b""), row.offset) for row in rows}


def model(log: GrowingLog) -> set[tuple[Any, ...]]:
    return {(partition, key or b"", value or b"", offset) for partition, key, value, _, _, offset, _ in expected(log)}


def test_a_commit_is_neither_replaced_nor_repeated(store: Store) -> None:
    """Another driver commits after this one has read the table, and before its request arrives. Later, the response to
    a commit is lost: S3A repeats the request, which the server refuses."""
    require_store(store.session, LAKE, writes=True)
    log, client = "race/_delta_log", store.server.client()
    other = json.dumps({"commitInfo": {"timestamp": 0, "operation": "WRITE", "isBlindAppend": True}}).encode()

    def append(number: int) -> None:
        store.session.range(number, number + 1).write.format("delta").mode("append").save(f"{LAKE}/race")

    append(0)
    first = f"{log}/00000000000000000001.json"
    store.on_put(first, "pass", lambda: client.put_object(Bucket="lake", Key=first, Body=other))
    append(1)
    store.on_put(f"{log}/00000000000000000003.json", "drop")
    append(2)
    assert {row.id for row in store.session.read.format("delta").load(f"{LAKE}/race").collect()} == {0, 1, 2}
    objects = store.server.objects(f"lake/{log}")
    assert objects["00000000000000000001.json"] == other
    assert sorted(name for name in objects if name.endswith("json")) == [f"{n:020}.json" for n in range(4)]


@pytest.mark.soak(COVERED)
def test_topics_are_exported_and_runs_are_recorded(
    store: Store, log: GrowingLog, run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Full and incremental exports, a dry run, and a ledger of two runs, which `history` and `report` read; nothing
    that is written or printed contains the credentials."""
    assert statuses(exported(log, "a")) == [("exported", "full")]
    assert table(store, "a") == model(log)
    assert statuses(exported(log, "a", execute=False)) == [("clean", "")]
    grow(log)
    [row] = exported(log, "a", change_feed=True)
    assert (row.status, row.strategy, row.table) == ("exported", "incremental", f"{LAKE}/a/t")
    assert table(store, "a") == model(log)
    changes = store.session.read.format("delta").option("readChangeFeed", "true").option("startingVersion", 1)
    kinds = {row["_change_type"] for row in changes.load(f"{LAKE}/a/t").select("_change_type").collect()}
    assert kinds & {"insert", "update_postimage"}

    ledger = ("--ledger", f"{LAKE}/ledger")
    for _ in range(2):
        result = run("rebuild-index", "--log-dirs", log.log_dir, *ledger, "--execute", "--output", "json")
        assert result.exit_code == 0, result.output
    result = run("history", *ledger, "--output", "json")
    runs = json.loads(result.stdout)
    assert [item["status"] for item in runs] == ["done", "done"], result.output
    kept = run("history", *ledger, "--maintain", "--execute", "--output", "json")
    assert {item["status"] for item in json.loads(kept.stdout)} == {"maintained"}, kept.output
    page = tmp_path / "page.html"
    shown = run("report", page, *ledger, "--run", runs[0]["run_id"])
    assert shown.exit_code == 0, shown.output

    written = [*store.server.objects("lake/a").values(), *store.server.objects("lake/ledger").values()]
    texts = [result.output, kept.output, shown.output, page.read_text(), "".join(capfd.readouterr())]
    assert len(written) > 10
    assert not any(secret.encode() in item for item in written for secret in (SECRET_KEY, ACCESS_KEY))
    assert not any(secret in text for text in texts for secret in (SECRET_KEY, ACCESS_KEY))


class Meetings:
    """Holds each request that creates a commit until another one for the same commit arrives, or a driver has ended.
    `commit` matches such a request, and its group the name of the commit.

    Commits that create tables are not held: meanwhile Delta would read a table that does not exist yet.
    """

    def __init__(self, commit: bytes) -> None:
        self._commit = re.compile(commit, re.DOTALL)
        self.drivers: list[subprocess.Popen[bytes]] = []
        self.met: set[bytes] = set()
        self._threads: dict[bytes, set[int]] = {}
        self._changed = threading.Condition()

    def on_request(self, sent: bytes) -> Action:
        if found := self._commit.search(sent):
            with self._changed:
                threads = self._threads.setdefault(found[1], set())
                threads.add(threading.get_ident())
                self._changed.notify_all()
                while len(threads) < 2 and all(driver.poll() is None for driver in self.drivers):
                    self._changed.wait(0.1)
                if len(threads) > 1:
                    self.met.add(found[1])
        return "pass"


@pytest.mark.soak("test_a_commit_is_neither_replaced_nor_repeated has one driver and a commit of another")
def test_two_drivers_that_always_commit_at_once_lose_nothing(store: Store) -> None:
    meetings, each = Meetings(rb"^PUT (\S+/_delta_log/(?!0{20})\d{20}\.json)"), 6
    store.proxy.on_request = meetings.on_request
    settings = json.dumps({f"spark.hadoop.{name}": value for name, value in S3A.items()})
    environment = {**os.environ, **store.server.environment, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{store.proxy.port}"}
    for name in ("a", "b"):
        command = [sys.executable, "-m", "tests.export.s3_driver", f"{LAKE}/both", name, str(each), settings]
        meetings.drivers.append(subprocess.Popen(command, env=environment))
    assert [driver.wait() for driver in meetings.drivers] == [0, 0]
    store.proxy.restore()
    rows = read_rows(f"{LAKE}/both", "runs", {}, store.session)
    assert sorted(row["run_id"] for row in rows) == sorted(f"{name}-{n}" for name in "ab" for n in range(each))
    assert len(meetings.met) > each


@pytest.mark.soak(COVERED)
def test_an_export_fails_if_another_driver_changes_its_rows(store: Store, log: GrowingLog) -> None:
    exported(log, "raced")
    grow(log)
    first = store.server.objects("lake/raced/t/_delta_log")["00000000000000000000.json"]
    [added, *_] = [item["add"] for line in first.splitlines() if "add" in (item := json.loads(line))]
    removed = {"path": added["path"], "deletionTimestamp": 1, "dataChange": True}
    other = "\n".join(map(json.dumps, ({"commitInfo": {"timestamp": 1, "operation": "DELETE"}}, {"remove": removed})))
    key, client = "raced/t/_delta_log/00000000000000000001.json", store.server.client()
    store.on_put(key, "pass", lambda: client.put_object(Bucket="lake", Key=key, Body=other.encode()))
    [row] = exported(log, "raced")
    assert row.status == "failed" and "DELTA_CONCURRENT" in row.error
    [row] = exported(log, "raced")
    assert (row.status, row.strategy) == ("exported", "full") and "changed by DELETE" in row.why
    assert table(store, "raced") == model(log)


@pytest.mark.soak(COVERED)
@pytest.mark.parametrize("part", ["/part-", "/_delta_log/0000000000000000000"])
@pytest.mark.parametrize("way", ["full", "incremental"])
def test_a_broken_network_leaves_the_previous_table(store: Store, log: GrowingLog, part: str, way: str) -> None:
    name = f"broken-{part[1:4]}-{way}"
    before = None
    if way == "incremental":
        exported(log, name)
        before = model(log)
        grow(log)
    store.on_put(part, "break")
    [row] = exported(log, name)
    assert (row.status, store.proxy.is_down) == ("failed", True), row
    assert "the table could not be written" in row.error and "[table-not-written]" in f"{row.error}"
    [row] = exported(log, name, execute=False)  # the network is still down
    assert row.status == "failed" and "cannot be read" in row.error
    with pytest.raises(KeytailError, match="writing to the store failed"):
        exported(log, name)
    store.proxy.restore()
    if before is not None:
        assert table(store, name) == before
    assert statuses(exported(log, name)) == [("exported", way)]
    assert table(store, name) == model(log)


@pytest.mark.soak(COVERED)
def test_a_commit_without_a_response_is_not_repeated(store: Store, log: GrowingLog) -> None:
    """The run cannot know that its commit succeeded. The next run finds out, and a ledger has no row twice."""
    store.on_put("_delta_log/00000000000000000000.json", "lose")
    assert [row.status for row in exported(log, "lost")] == ["failed"]
    store.proxy.restore()
    assert statuses(exported(log, "lost")) == [("clean", "")]
    assert table(store, "lost") == model(log)
    ledger = Ledger(store.engine(), f"{LAKE}/lost-ledger", "run")
    ledger.open()
    store.on_put("runs/_delta_log/00000000000000000001.json", "lose")
    with pytest.raises(KeytailError, match="cannot be written"):
        ledger.begin(arguments=["x"])
    store.proxy.restore()
    assert len(read_rows(f"{LAKE}/lost-ledger", "runs", {}, store.session)) == 1
