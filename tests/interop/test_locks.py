"""The lock of a log dir, shared with Kafka's classes and brokers: with two processes at once, after a lock file was
replaced, and after the holder has ended, failed or been killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from keytail.cli.selection import PartitionFilter
from keytail.errors import Refused
from keytail.log import lock
from keytail.log.fs import FileSystem
from keytail.rebuild_index import driver as rebuild
from tests import golden
from tests.interop.broker import Broker
from tests.interop.broker_client import from_wire
from tests.interop.broker_story import KEYTAIL, complaints, repairs, start_client
from tests.interop.kafka import Kafka
from tests.log_dirs import snapshot

pytestmark = pytest.mark.interop

INDEXED = ("zstd", 0)


class Paused(FileSystem):
    """Pauses before the first rename, when all files are written, and none has its final name."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.continue_ = threading.Event(), threading.Event()

    def rename(self, source, target):
        self.reached.set()
        assert self.continue_.wait(timeout=300)
        super().rename(source, target)


def run(name: str, log_dir: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [str(KEYTAIL), name, "--log-dirs", str(log_dir), *golden.topic_config_arguments(), *flags]
    if name == "rebuild-index":
        command = [str(KEYTAIL), name, "--log-dirs", str(log_dir), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def files_under_lock(log_dir: Path) -> dict[str, tuple[bytes, int]]:
    """Return all files except those of the metadata log, which a controller opens before it takes the lock."""
    return {name: facts for name, facts in snapshot(log_dir).items() if not name.startswith("__cluster_metadata-0/")}


@contextlib.contextmanager
def paused_rebuild(log_dir: Path) -> Iterator[list[rebuild.RebuildRow]]:
    """Run `rebuild-index --execute`, paused before it renames files to their final names until the block ends."""
    fs, rows = Paused(), []
    request = rebuild.Request(PartitionFilter(log_dirs=(str(log_dir),)), execute=True)
    thread = threading.Thread(target=lambda: rows.extend(rebuild.rebuild(request, fs)))
    thread.start()
    try:
        assert fs.reached.wait(timeout=300)
        yield rows
    finally:
        fs.continue_.set()
        thread.join()


def test_a_broker_and_a_run_exclude_each_other(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A broker that starts during a run ends at once and does not affect the run; a run beside a running broker is
    refused and does not affect the broker.
    """
    root = tmp_path_factory.mktemp("broker")
    log_dir = golden.unpack(root)
    for path in (log_dir / f"{INDEXED[0]}-{INDEXED[1]}").glob("*.index"):
        path.unlink()
    with paused_rebuild(log_dir) as rows:
        before = files_under_lock(log_dir)
        with pytest.raises(RuntimeError, match="ended with status"):
            Broker(log_dir, root / "too-early").start()
        assert "Failed to acquire lock on file .lock" in (root / "too-early" / "broker.log").read_text()
        second = run("rebuild-index", log_dir, "--execute")
        assert second.returncode == 1
        assert "the log dir is in use by another keytail run" in second.stderr
        assert files_under_lock(log_dir) == before
    assert {row.status for row in rows} == {"sound", "rebuilt"}
    assert (log_dir / ".lock").exists()
    broker = Broker(log_dir, root / "work")
    with start_client() as client, broker:
        client.connect(broker)
        assert client.consume([INDEXED]) == [
            item for item in map(from_wire, golden.record_rows()) if item[:2] == INDEXED
        ]
        for name in ("rebuild-index", "compact"):
            beside = run(name, log_dir, "--execute")
            assert beside.returncode == 1, beside.stdout
            pid = broker._process.pid  # type: ignore[union-attr]
            assert f"in use by process {pid}, with a lock like that of a running broker" in beside.stderr
        assert client.produce("new", *INDEXED, [(1, b"k", b"v")])
    assert complaints(broker.log_lines()) == []
    assert repairs(broker.log_lines()) == []


class StepsBeforeLocking(FileSystem):
    """Runs steps after the lock file was opened and before it is locked."""

    def __init__(self, *steps) -> None:
        super().__init__()
        self.steps = list(steps)

    def open_lock_file(self, path, like):
        opened = super().open_lock_file(path, like)
        if self.steps:
            self.steps.pop(0)()
        return opened


def test_a_lock_file_that_a_stopping_broker_removes_is_not_used(tmp_path: Path, kafka: Kafka) -> None:
    assert kafka.lock(tmp_path)
    with lock.hold([str(tmp_path)], StepsBeforeLocking(lambda: kafka.unlock(tmp_path))):
        assert not kafka.lock(tmp_path)
    assert kafka.lock(tmp_path), "the lock must be free after the block"
    kafka.unlock(tmp_path)
    assert not (tmp_path / ".lock").exists(), "a broker removes its lock file"


def test_a_broker_that_restarts_between_open_and_lock_has_the_lock(tmp_path: Path, kafka: Kafka) -> None:
    def restarts() -> None:
        kafka.unlock(tmp_path)
        assert kafka.lock(tmp_path)

    assert kafka.lock(tmp_path)
    with pytest.raises(Refused, match="with a lock like that of a running broker"):
        with lock.hold([str(tmp_path)], StepsBeforeLocking(restarts)):
            raise AssertionError("not reached")
    assert (tmp_path / ".lock").exists()
    kafka.unlock(tmp_path)


def test_a_run_does_not_remove_the_lock_file_of_another_holder(
    tmp_path: Path, kafka: Kafka
) -> None:
    with lock.hold([str(tmp_path)]):
        (tmp_path / ".lock").unlink()
        assert kafka.lock(tmp_path)
    assert (tmp_path / ".lock").exists()
    with pytest.raises(Refused, match="in use by process"), lock.hold([str(tmp_path)]):
        raise AssertionError("not reached")
    kafka.unlock(tmp_path)


def test_a_run_that_fails_releases_the_lock(tmp_path: Path, kafka: Kafka) -> None:
    with pytest.raises(ZeroDivisionError), lock.hold([str(tmp_path)]):
        raise ZeroDivisionError
    assert kafka.lock(tmp_path)
    kafka.unlock(tmp_path)


HOLDER = """
import subprocess, sys, time
from keytail.log.lock import hold
with hold([sys.argv[1]]):
    child = subprocess.Popen(["sleep", "600"])
    print(child.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_ended_process_releases_the_lock_although_its_children_run(
    number: signal.Signals, tmp_path: Path, kafka: Kafka
) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        assert not kafka.lock(tmp_path)
        holder.send_signal(number)
        holder.wait()
        os.kill(child, 0)
        assert kafka.lock(tmp_path)
        kafka.unlock(tmp_path)
    finally:
        holder.stdout.close()
        os.kill(child, signal.SIGKILL)
    with lock.hold([str(tmp_path)]):
        assert not kafka.lock(tmp_path)
