"""Spark started as root on log dirs of another user: the JVM runs as root, and its workers work as that user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.class_archives import submit_options
from tests.log_dirs import random_records, write_log_dir
from tests.owned import (
    BROKER,
    ROOT_ONLY,
    foreign,
    give,
    ids_as,
    ids_of,
    keytail,
    open_directory,
    private_directory,
    python,
)

pytestmark = [pytest.mark.spark, ROOT_ONLY]

NOTE = f"started as root; working as user id {BROKER}, the owner of"
COMPACT = ("--topics-have-no-overrides", "--topic-config", "orders:cleanup.policy=compact")
REPOSITORY = Path(__file__).parents[2]


@dataclass
class Case:
    log_dir: Path
    private: Path


@pytest.fixture
def case() -> Iterator[Case]:
    with open_directory() as home:
        log_dir = write_log_dir(home / "logs", {f"orders-{n}": random_records(n, 400) for n in range(2)})
        give(log_dir, BROKER)
        private = private_directory(home / "private")
        (private / "secret").write_text("KNOWN-TO-ROOT\n")
        yield Case(log_dir, private)


TASKS = """
import json, os, sys
from pathlib import Path
from keytail.acting_user import as_caller, become
from keytail.log.fs import LOCAL
from keytail.log.owner import work_as_owner
from keytail.run.spark.session import end_jvm, local_session
from keytail.run.spark.engine import SparkEngine
secret = sys.argv[2]
def status():
    return Path("/proc/self/status").read_text()
def task(number, attempt):
    with as_caller():
        as_root = Path(secret).read_text()
    try:
        as_owner = Path(secret).read_text()
    except PermissionError:
        as_owner = None
    return status(), as_root, as_owner, os.getpid()
def plain(batches):
    import pyarrow
    for batch in batches:
        yield pyarrow.RecordBatch.from_pydict({"pid": [os.getpid()], "status": [status()]})
work_as_owner(LOCAL, [sys.argv[1]])
spark = local_session("local[2]")
found = [one.value for one in SparkEngine(spark).run_bundle([0, 1], task)]
after = [list(row) for row in spark.range(0, 2, 1, 2).mapInArrow(plain, "pid long, status string").collect()]
jvm = Path(f"/proc/{spark.sparkContext._gateway.proc.pid}/status").read_text()
scratch = Path(spark.sparkContext._temp_dir)
with as_caller():
    owners = [one.stat().st_uid for one in (scratch, *scratch.parents)]
print(json.dumps([status(), jvm, found, after, owners]))
spark.stop()
end_jvm()
"""


def test_tasks_work_as_the_owner_and_workers_are_root_again_afterwards(case: Case) -> None:
    driver, jvm, found, after, of_scratch = python(TASKS, case.log_dir, case.private / "secret")
    assert ids_of(driver) == ids_as(BROKER)
    assert ids_of(jvm)["Uid"] == [0, 0, 0, 0]
    assert BROKER not in ids_of(jvm)["Groups"]
    for status, as_root, as_owner, _ in found:
        assert ids_of(status) == ids_as(BROKER)
        assert (as_root, as_owner) == ("KNOWN-TO-ROOT\n", None)
    assert {pid for *_, pid in found} & {pid for pid, _ in after}, "a worker must be reused"
    assert set(of_scratch) == {0}, "Spark's own files must belong to root"
    for _, status in after:
        assert ids_of(status)["Uid"] == [0, 0, 0, 0]
        assert BROKER not in ids_of(status)["Groups"]


@pytest.mark.soak("the other tests of this file, compact/fan_out/test_on_spark.py, cli/test_owner.py")
def test_a_fan_out_writes_a_ledger_that_only_root_can_read(case: Case) -> None:
    """test_a_job_of_spark_submit_works_as_the_owner covers a compaction by one task."""
    flags = ("--log-dirs", case.log_dir, "--execute", "--ledger", case.private / "ledger", "--master", "local[2]")
    (case.log_dir / "orders-0" / "00000000000000000000.index").unlink()
    rebuilt = keytail("rebuild-index", *flags)
    assert rebuilt.returncode == 0, rebuilt.stderr
    assert rebuilt.stderr.count(NOTE) == 1
    done = keytail("compact", *COMPACT, *flags, "--fan-out", "always", "--report", case.private / "report.html")
    assert done.returncode == 0, done.stderr
    reported = keytail("history", "--ledger", case.private / "ledger", "--output", "json")
    assert [run["status"] for run in json.loads(reported.stdout)] == ["done", "done"]
    assert foreign(case.log_dir, BROKER) == []
    assert foreign(case.private, 0) == []


@pytest.mark.soak("hostile/test_owner_attack.py")
def test_verify_and_audit_on_spark_do_not_follow_the_owners_links(case: Case) -> None:
    for name in ("leader-epoch-checkpoint", "00000000000000000000.log"):
        (case.log_dir / "orders-0" / name).unlink()
        (case.log_dir / "orders-0" / name).symlink_to(case.private / "secret")
    with open_directory() as home:
        replica = write_log_dir(home / "logs", {f"orders-{n}": random_records(n, 400) for n in range(2)})
        give(replica, BROKER)
        for command in (
            ("verify", "--log-dirs", case.log_dir),
            ("audit", "--replica", case.log_dir, "--replica", replica),
        ):
            done = keytail(*command, "--master", "local[2]", "--output", "json")
            assert NOTE in done.stderr
            rows = {row["partition"]: row["status"] for row in json.loads(done.stdout)}
            assert rows[1] in ("sound", "alike"), done.stdout
            assert rows[0] not in ("sound", "alike")
            assert "KNOWN-TO-ROOT" not in done.stdout + done.stderr


@pytest.mark.soak("the import, which reads what only root reads; the tasks, which are root again afterwards")
def test_an_export_is_written_and_continued_in_a_directory_that_only_root_can_write(case: Case) -> None:
    command = ("export", "--log-dirs", case.log_dir, "--to", case.private / "tables", "--execute", "--output", "json")
    done = keytail(*command)
    assert done.returncode == 0, done.stderr
    assert [row["status"] for row in json.loads(done.stdout)] == ["exported", "exported"]
    again = keytail(*command)
    assert [row["status"] for row in json.loads(again.stdout)] == ["clean", "clean"], again.stderr
    assert foreign(case.private, 0) == foreign(case.log_dir, BROKER) == []


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        pytest.param("parquet", ("--master", "local[2]"), marks=pytest.mark.soak("json")),
        pytest.param("json", (), marks=pytest.mark.one_of("Spark reads as root and as the owner")),
        ("parquet", ()),
    ],
)
def test_an_import_reads_files_that_only_root_can_read(case: Case, kind: str, more: tuple[str, ...]) -> None:
    """With a master, Spark's tasks read Parquet; without one, the driver does. Spark's JVM reads JSON."""
    source = case.private / f"source.{kind}"
    if kind == "parquet":
        keys = pyarrow.array([b"key-%d" % n for n in range(100)])
        pyarrow.parquet.write_table(pyarrow.table({"key": keys, "value": keys}), source)
    else:
        source.write_text("".join(f'{{"key": "key-{n}", "value": "v"}}\n' for n in range(100)))
    given = ("--log-dirs", case.log_dir, "--topic", "orders", "--topic-id", "AAAAAAAAAAAAAAAAAAAAAQ", "--format", kind)
    settings = (*COMPACT, "--append", "--single-replica")
    done = keytail("import", source, *given, *settings, *more, "--execute", "--output", "json")
    assert done.returncode == 0, done.stderr
    assert sum(row["records"] for row in json.loads(done.stdout)) == 100
    assert foreign(case.log_dir, BROKER) == []


SOURCE = """
import json, os, sys
from keytail.acting_user import as_caller
from keytail.run.spark.session import end_jvm, local_session
spark = local_session("local[2]")
def count():
    frame = spark.read.format("kafka-log").option("logDirs", sys.argv[1]).option("topic", "orders").load()
    try:
        return frame.count()
    except Exception as problem:
        return str(problem)
found = count()
with as_caller():
    os.chown(sys.argv[2], 0, 0)
    os.chmod(sys.argv[2], 0o600)
print(json.dumps([found, count()]))
spark.stop()
end_jvm()
"""


@pytest.mark.one_of("Spark reads as root and as the owner")
def test_the_spark_source_reads_as_the_owner(case: Case) -> None:
    """The source reads the owner's files, but not files that only root can read."""
    log = case.log_dir / "orders-0" / "00000000000000000100.log"
    found, reported = python(SOURCE, case.log_dir, log)
    assert found == 800
    assert "Permission denied" in str(reported)


@pytest.mark.one_of("spark-submit beside other users")
def test_a_job_of_spark_submit_works_as_the_owner(case: Case) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYSPARK_", "SPARK_"))}
    environment |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    environment["SPARK_SUBMIT_OPTS"] = submit_options()  # this saves time
    submit = Path(sys.executable).with_name("spark-submit")
    command = [submit, "--master", "local[2]", REPOSITORY / "jobs" / "compact.py", "--log-dirs", case.log_dir, *COMPACT]
    command += ["--execute", "--output", "json", "--rows-file", case.private / "rows.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    assert {row["status"] for row in json.loads((case.private / "rows.json").read_text())} == {"compacted"}
    assert done.stderr.count(NOTE) == 1
    assert foreign(case.log_dir, BROKER) == []
