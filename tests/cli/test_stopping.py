"""SIGINT and SIGTERM sent to real runs: to the process alone, and to its process group, as a terminal does."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from keytail.cli import stopping
from keytail.cli.command import Command
from keytail.cli.stopping import Stopped, stop_with_parent, stoppable
from keytail.compact.running.compaction import Compaction
from keytail.compact.running.replacing import planned_row
from keytail.errors import KeytailError
from keytail.expire import driver as expire_driver
from keytail.log.fs import LOCAL
from keytail.log.lock import is_held
from keytail.log.replacement.recover import recover
from keytail.main import running
from keytail.rebuild_index import driver as rebuild_index_driver
from keytail.run.ended import SparkEnded
from keytail.run.rows import ResultRow
from keytail.salvage import driver as salvage_driver
from keytail.verify import driver as verify_driver
from tests.chance import SEED
from tests.cli.forked import keytail
from tests.command_line import Run, rows_of
from tests.compact.test_command import CONFIG, KEYTAIL, assert_unchanged_records
from tests.log_dirs import BASE_MS, newest_by_key, random_records, records_of, snapshot, write_log_dir
from tests.reference.batches import Rec
from tests.run.test_submit import JOB, ROOT, SUBMIT

LONGEST_S = 300.0  # on a busy machine
SEGMENT = "orders:segment.bytes=1048576"
ROUNDS = ("--topic-config", SEGMENT, "--grouping", "kafka", "--max-scratch-bytes", "2200k", "--throttle", "4m")


def large_records(count: int = 400) -> list[Rec]:
    """Return eight MiB of records, which is more than fits into the scratch space at a time."""
    chance = random.Random(SEED)
    return [Rec(n, BASE_MS + n, b"%d" % chance.randrange(150), chance.randbytes(20000)) for n in range(count)]


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    print("seed", SEED)
    return write_log_dir(tmp_path / "logs", {"orders-0": large_records(), "orders-1": large_records(40)}, segments=16)


def start(command: list[str], tmp_path: Path, **variables: str) -> subprocess.Popen[str]:
    """Start a command and return its process, which SIGINT stops even if a shell runs the tests in the background."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYSPARK_", "SPARK_"))}
    environment |= {"SPARK_CONF_DIR": str(ROOT / "conf"), "SPARK_LOCAL_IP": "127.0.0.1"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment |= variables
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with (tmp_path / "stderr").open("w") as errors:
            return subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, start_new_session=True
            )
    finally:
        signal.signal(signal.SIGINT, previous)


def wait_for(there: Callable[[], object], run: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not there():
        assert run.poll() is None, "the run ended before it could be stopped"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def inode_of(path: Path) -> int | None:
    """Return the inode, or None while the segment is being replaced."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def group_members(group: int) -> list[int]:
    """Return the ids of the processes of a process group, without zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def wait_until_gone(group: int) -> None:
    deadline = time.monotonic() + LONGEST_S
    while group_members(group):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ended(run: subprocess.Popen[str]) -> tuple[list[dict[str, Any]], float]:
    """Return the rows of a run, and the seconds until all its processes had ended."""
    start_s = time.monotonic()
    output, _ = run.communicate(timeout=LONGEST_S)
    wait_until_gone(run.pid)
    return json.loads(output), time.monotonic() - start_s


def check_left(log_dir: Path, before: dict[str, list[Rec]]) -> None:
    assert not is_held(str(log_dir))
    assert not [path for path in log_dir.rglob("*") if path.suffix in (".clean", ".swap", ".deleted", ".cleaned")]
    for name, records in before.items():
        assert recover(LOCAL, str(log_dir / name)) == []
        assert_unchanged_records(records, log_dir / name)


def jvm_of(group: int) -> int | None:
    """Return the JVM of a process group, or None. A child that has not yet executed Java is ignored."""
    for pid in group_members(group):
        try:
            if os.readlink(f"/proc/{pid}/exe").endswith("/java"):
                return pid
        except OSError:
            continue
    return None


@pytest.mark.one_of("a signal to a run with Spark")
@pytest.mark.spark
def test_ctrl_c_while_spark_starts_ends_all_processes(log_dir: Path, tmp_path: Path) -> None:
    before = snapshot(log_dir)
    command = [str(KEYTAIL), "compact", "--log-dirs", str(log_dir), *CONFIG, "--execute", "--master", "local[*]"]
    run = start(command, tmp_path)
    wait_for(lambda: jvm_of(run.pid), run)
    os.killpg(run.pid, signal.SIGINT)
    run.communicate(timeout=LONGEST_S)  # this returns only when the JVM, too, has closed the pipes
    errors = (tmp_path / "stderr").read_text()
    assert run.returncode == 130, errors
    assert "starting Spark" in errors
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert snapshot(log_dir) == before


@pytest.mark.spark
@pytest.mark.soak("tests/run/test_without_spark.py: a signal between passes")
def test_after_ctrl_c_between_passes_the_run_reports_its_progress_and_the_next_run_continues(
    log_dir: Path, tmp_path: Path
) -> None:
    before = {name: records_of(log_dir / name) for name in ("orders-0", "orders-1")}
    bytes_before = sum(log.stat().st_size for log in (log_dir / "orders-0").glob("*.log"))
    flags = ["--log-dirs", str(log_dir), *CONFIG, *ROUNDS, "--execute", "--master", "local[2]", "--output", "json"]
    run = start([str(KEYTAIL), "compact", *flags], tmp_path)
    first = log_dir / "orders-0" / f"{0:020d}.log"
    inode = first.stat().st_ino
    began_s = time.monotonic()
    wait_for(lambda: inode_of(first) not in (None, inode), run)  # the first pass is done
    longest_s = max(30, 3 * (time.monotonic() - began_s))  # the first pass took a third; another one may take longer
    time.sleep(random.Random(SEED).uniform(0, 1))
    os.killpg(run.pid, signal.SIGINT)
    rows, seconds = ended(run)
    errors = (tmp_path / "stderr").read_text()
    assert run.returncode == 130, errors
    assert "interrupted by SIGINT" in errors
    assert "Traceback" not in errors
    assert "Exception" not in errors
    assert seconds < longest_s
    check_left(log_dir, before)
    [row] = [row for row in rows if row["partition"] == 0]
    assert row["status"] == "skipped", row
    assert "groups done, safe to start the broker" in row["error"]
    assert 0 < row["bytes_after"] < bytes_before
    assert "orders 0" not in ((log_dir / "cleaner-offset-checkpoint").read_text() if
                              (log_dir / "cleaner-offset-checkpoint").exists() else "")  # fmt: skip
    done = keytail("compact", "--log-dirs", log_dir, *CONFIG, "--execute", "--output", "json")
    assert done.returncode == 0, done.stderr
    assert [row["status"] for row in json.loads(done.stdout) if row["partition"] == 0] == ["compacted"]
    for name, records in before.items():
        assert_unchanged_records(records, log_dir / name)


@pytest.mark.one_of("a signal to a run with Spark")
@pytest.mark.spark
@pytest.mark.parametrize("to_group", [True, pytest.param(False, marks=pytest.mark.soak("to the group"))])
def test_spark_submit_stops_on_a_signal(to_group: bool, log_dir: Path, tmp_path: Path) -> None:
    """SIGINT reaches the JVM and the driver of the group; SIGTERM reaches only the JVM, whose end notifies the driver.
    """
    before = {name: records_of(log_dir / name) for name in ("orders-0", "orders-1")}
    untouched = snapshot(log_dir)
    flags = ["--log-dirs", str(log_dir), *CONFIG, "--throttle", "1m", "--execute", "--output", "json"]
    flags += ["--report", str(tmp_path / "page.html")]
    run = start([str(SUBMIT), "--master", "local[2]", str(JOB), *flags], tmp_path)
    wait_for(lambda: list(log_dir.rglob("*.clean")), run)
    if to_group:
        os.killpg(run.pid, signal.SIGINT)
    else:
        os.kill(run.pid, signal.SIGTERM)
    run.communicate(timeout=LONGEST_S)
    wait_until_gone(run.pid)
    errors = (tmp_path / "stderr").read_text()
    assert run.returncode in (130, 143), errors
    if to_group:
        assert "interrupted by SIGINT" in errors
        assert "Exception" not in errors, "the JVM, which got the signal at the same time, must print nothing"
    else:  # the JVM stops its session, so that the run may fail before the driver detects the end of the JVM
        assert "interrupted by SIGTERM" in errors or "safe to start the broker" in errors
    assert "Traceback" not in errors
    check_left(log_dir, before)
    assert snapshot(log_dir) == untouched
    assert newest_by_key(records_of(log_dir / "orders-0")) == newest_by_key(before["orders-0"])
    page = (tmp_path / "page.html").read_text()
    assert "The run did not complete" in page
    assert "orders-0" in page


@pytest.mark.one_of("a kill of a run with Spark")
@pytest.mark.spark
def test_a_run_whose_jvm_is_killed_reports_its_progress(log_dir: Path, tmp_path: Path) -> None:
    before = {name: records_of(log_dir / name) for name in ("orders-0", "orders-1")}
    untouched = snapshot(log_dir)
    flags = ["--log-dirs", str(log_dir), *CONFIG, "--throttle", "1m", "--execute", "--master", "local[2]"]
    run = start([str(KEYTAIL), "compact", *flags, "--output", "json"], tmp_path)
    wait_for(lambda: list(log_dir.rglob("*.clean")), run)
    jvm = jvm_of(run.pid)
    assert jvm is not None
    os.kill(jvm, signal.SIGKILL)
    rows, _ = ended(run)
    errors = (tmp_path / "stderr").read_text()
    assert run.returncode == 1, errors
    assert errors.count("Spark ended during the run") == 1, errors
    assert "To continue, run the same command again" in errors
    assert "Traceback" not in errors
    assert "Exception" not in errors
    assert {row["status"] for row in rows} <= {"skipped", "not-begun"}
    check_left(log_dir, before)
    assert snapshot(log_dir) == untouched


@pytest.mark.one_of("a signal to a run with Spark")
@pytest.mark.spark
def test_a_stopped_import_leaves_no_files(tmp_path: Path) -> None:
    """The tasks of the import create files continuously, and Spark waits for seconds before it kills them."""
    print("seed", SEED)
    chance = random.Random(SEED)
    table = pa.table({"key": [b"%d" % n for n in range(3000)], "value": [chance.randbytes(1000) for _ in range(3000)]})
    pq.write_table(table, tmp_path / "s.parquet")
    logs = write_log_dir(tmp_path / "logs", {})
    (logs / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":-1}')
    (tmp_path / "notes").mkdir()
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "spark-defaults.conf").write_text("spark.python.daemon.module tests.run.disturbed\n")
    flags = ["--topic", "orders", "--log-dirs", str(logs), "--single-replica", "--topics-have-no-overrides"]
    flags += ["--topic-config", "orders:cleanup.policy=delete"]
    flags += ["--partition-count", "2", "--topic-id", "AAAAAAAAAAAAAAAAAAAAAQ", "--segment-bytes", "64k"]
    run = start(
        [str(KEYTAIL), "import", str(tmp_path / "s.parquet"), *flags, "--execute", "--master", "local[2]"], tmp_path,
        SPARK_CONF_DIR=str(tmp_path / "conf"), PYTHONPATH=str(ROOT), KEYTAIL_NOTES=str(tmp_path / "notes"),
        KEYTAIL_DISTURBED="write-0:slowly,write-1:slowly",
    )  # fmt: skip
    wait_for(lambda: list(logs.rglob("*.log.*.clean")), run)
    time.sleep(chance.uniform(0, 1))
    os.killpg(run.pid, signal.SIGINT)
    run.communicate(timeout=LONGEST_S)
    wait_until_gone(run.pid)
    errors = (tmp_path / "stderr").read_text()
    assert run.returncode == 130, errors
    assert "interrupted by SIGINT" in errors
    assert "Traceback" not in errors
    assert "Exception" not in errors
    check_left(logs, {})
    assert [log.stat().st_size for log in logs.rglob("*.log")] == [0, 0]


def stop_after(count: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the given one this number of times, and then raises Stopped as Ctrl-C does."""
    calls = iter(range(count))

    def stopping_function(*given: Any, **named: Any) -> Any:
        if next(calls, None) is None:
            raise Stopped(signal.SIGINT)
        return function(*given, **named)

    return stopping_function


@pytest.mark.parametrize(
    ("module", "name", "flags"),
    [
        (expire_driver, "_decide_and_remove", ("expire",)),
        (salvage_driver, "_one", ("salvage", "--to", "TO")),
        (rebuild_index_driver, "_row", ("rebuild-index",)),
        (verify_driver, "_with_findings", ("verify",)),
    ],
    ids=["expire", "salvage", "rebuild-index", "verify"],
)  # fmt: skip
@pytest.mark.parametrize("output", ["table", "json"])
def test_the_rows_of_an_interrupted_run_are_printed(
    module: Any, name: str, flags: tuple[str, ...], output: str,
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    records = random_records(0, 40)
    log_dir = write_log_dir(tmp_path / "logs", {f"t-{number}": records for number in range(3)})
    monkeypatch.setattr(module, name, stop_after(2, getattr(module, name)))
    arguments = [str(tmp_path / "to") if flag == "TO" else flag for flag in flags]
    result = run(*arguments, "--log-dirs", log_dir, "--output", output)
    assert result.exit_code == 130, result.output
    assert "interrupted by SIGINT: 2 " in result.stderr
    assert "partitions without a row were not finished" in result.stderr
    assert ("Nothing in a log dir was changed" in result.stderr) == ("--execute" not in flags)
    if output == "json":
        rows = [f"{row['topic']}-{row['partition']}" for row in json.loads(result.stdout)]
    else:
        rows = [line.split()[0] for line in result.stdout.splitlines() if re.match(r"t-\d  ", line)]
    assert len(rows) == 2
    assert set(rows) < {"t-0", "t-1", "t-2"}


def test_an_interrupted_compaction_reports_partitions_that_were_not_begun(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C interrupts the second of three partitions, after the first one has ended."""
    records = random_records(0, 40)
    log_dir = write_log_dir(tmp_path / "logs", {f"orders-{number}": records for number in range(3)})

    def compact_one(self: Compaction) -> list[ResultRow]:
        first, second, _ = self.tasks
        self.rows.begin([first])
        self.rows.add(first, replace(planned_row(first), status="compacted"))
        self.rows.begin([second])
        raise Stopped(signal.SIGINT)

    monkeypatch.setattr(Compaction, "run", compact_one)
    flags = ("compact", "--log-dirs", log_dir, *CONFIG, "--execute")
    result = run(*flags)
    assert result.exit_code == 130, result.output
    rows = dict(re.findall(r"^(orders-\d) +([a-z-]+) ", result.stdout, re.MULTILINE))
    assert rows == {"orders-0": "compacted", "orders-1": "not-begun", "orders-2": "not-begun"}
    assert "orders-2 not-begun: the run was interrupted before this partition was begun" in result.stdout
    assert "interrupted by SIGINT: 2 not-begun, 1 compacted." in result.stderr
    statuses = {name: row["status"] for name, row in rows_of(run(*flags, "--output", "json")).items()}
    assert statuses == rows


@dataclass(frozen=True)
class Failing:
    """The request of a command that ends with `problem`."""

    problem: BaseException


def fail(request: Failing) -> list[ResultRow]:
    raise request.problem


def result_of(
    problem: BaseException, capfd: pytest.CaptureFixture[str], **flags: object
) -> tuple[int, str, str]:
    """Return status, standard output and standard error of a command that ends with `problem`."""
    command = Command(name="fail", help="", request=Failing, run="tests.cli.test_stopping:fail")
    status = running._status_of(command, {"output": "json", **flags}, {"problem": problem})
    out, err = capfd.readouterr()
    return status, out, err


def test_the_rows_of_a_run_whose_spark_has_ended_are_printed(capfd: pytest.CaptureFixture[str]) -> None:
    problem = SparkEnded()
    problem.rows = [ResultRow("orders", 0, "/logs", "compacted"), ResultRow("orders", 1, "/logs", "skipped")]
    status, out, err = result_of(problem, capfd, execute=True)
    assert status == 1
    assert [row["status"] for row in json.loads(out)] == ["compacted", "skipped"]
    assert "session was stopped: 1 compacted, 1 skipped. Partitions that are reported as done are complete" in err


def test_a_signal_while_an_error_is_printed_causes_one_message(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_error = running.show.print_error
    signals = iter([signal.SIGTERM])

    def interrupted(text: str) -> None:
        for number in signals:
            signal.raise_signal(number)
        print_error(text)

    monkeypatch.setattr(running.show, "print_error", interrupted)
    status, _, err = result_of(KeytailError("the disk is full"), capfd)
    assert status == 143
    assert "interrupted by SIGTERM. Nothing in a log dir was changed" in err


@pytest.mark.parametrize("seen", [[1, 1], []], ids=["it ends during the run", "it ended before the run"])
def test_the_end_of_the_parent_is_signalled_only_during_the_run(
    seen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No signal is sent before the run begins or after its last message: SIGTERM would then end the process without a
    message.
    """
    parents = iter(seen)
    monkeypatch.setattr(os, "getppid", lambda: next(parents, 2))
    monkeypatch.setattr(stopping, "_PARENT_CHECK_S", 0.01)
    handler = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("a signal was sent before the run began"))
    try:
        stop_with_parent(1)
        time.sleep(0.1)
        with pytest.raises(Stopped), stoppable():
            for _ in range(6000):
                time.sleep(0.01)
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_ctrl_c_while_modules_are_imported_prints_no_traceback() -> None:
    code = """
import os, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from keytail.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_a_repeated_signal_is_raised_only_after_some_time(capfd: pytest.CaptureFixture[str]) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped) as stopped, stoppable():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGINT)  # a second signal arrives during the cleanup
    assert stopped.value.exit_status == 143
    assert "already stopping" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == handler


def test_an_ignored_signal_remains_ignored() -> None:
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stoppable():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, handler)


def test_an_interrupted_warm_reports_that_compiled_kernels_are_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keytail.doctor.driver._warm", stop_after(0, lambda: None))
    result = run("doctor", "--warm")
    assert result.exit_code == 130
    assert "interrupted by SIGINT. Kernels that are compiled are kept" in result.stderr
    assert "broker" not in result.stderr


def test_a_compaction_interrupted_before_its_first_partition_has_all_rows(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_dir = write_log_dir(tmp_path / "logs", {f"orders-{number}": random_records(number, 40) for number in range(2)})
    monkeypatch.setattr("keytail.compact.steps.Steps.start", stop_after(0, lambda: None))
    result = run("compact", "--log-dirs", log_dir, *CONFIG, "--execute", "--output", "json")
    assert result.exit_code == 130
    assert {name: row["status"] for name, row in rows_of(result).items()} == {
        "orders-0": "not-begun", "orders-1": "not-begun",
    }  # fmt: skip
