"""A Spark Python daemon whose workers fail on demand while they write, for tests on a cluster.

    spark.python.daemon.module           tests.run.disturbed
    spark.executorEnv.KEYTAIL_DISTURBED  read-1:executor,write-0:late
    spark.executorEnv.KEYTAIL_NOTES      DIRECTORY

`read-1` is the task of an import that reads slice 1, and `write-0` the one that writes partition 0; the names of their
scratch files identify them. The first attempt is disturbed after its first write to such a file: `worker` and
`executor` kill these processes. With `slow` the attempt waits until another attempt has closed its file, with `late`
until the run has imported the partition; then it continues. With `slowly` every attempt waits before each write. Every
attempt leaves an empty file in the directory.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keytail.format import names
from keytail.log.fs import FileSystem

LONGEST_S = 600.0


def disturb(notes: Path, how: dict[str, str]) -> None:
    """Disturb the file operations of this process, and of the processes that it forks."""
    real_write, real_close = FileSystem.write, FileSystem.close

    def write(self: FileSystem, fd: int, buffer: Any) -> int:
        path = self._path_of.get(fd, "")
        step = step_of(path)
        if how.get(step) == "slowly":
            time.sleep(0.25)
        written = real_write(self, fd, buffer)
        if step:
            name = names.parse_file_name(os.path.basename(path))
            (notes / f"{step}.{name.attempt}.{os.getppid()}").touch()
            if how.get(step, "slowly") != "slowly" and is_first(notes / f"{step}.first"):
                disturb_step(notes, step, how[step], path)
        return written

    def close(self: FileSystem, fd: int) -> None:
        step = step_of(self._path_of.get(fd, ""))
        real_close(self, fd)
        if step:
            (notes / f"{step}.done").touch()

    FileSystem.write, FileSystem.close = write, close  # type: ignore[method-assign]


def step_of(path: str) -> str:
    """Return the step of an import that writes to this file, or "" for any other file."""
    name = names.parse_file_name(os.path.basename(path))
    if name.kind != "scratch":
        return ""
    if name.suffix == names.CELLS:
        return f"read-{name.base_offset}"
    if name.suffix == names.LOG:
        return f"write-{os.path.dirname(path).rpartition('-')[2]}"
    return ""


def disturb_step(notes: Path, step: str, kind: str, path: str) -> None:
    if kind == "worker":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "executor":
        os.kill(executor(), signal.SIGKILL)
        time.sleep(60)  # its daemon ends this process
    elif kind == "slow":
        wait_for((notes / f"{step}.done").exists)
    else:
        record = Path(path).with_name(names.IMPORT_RECORD)
        wait_for(lambda: record.exists() and "done" in record.read_text())


def is_first(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def wait_for(there: Callable[[], bool]) -> None:
    last_s = time.monotonic() + LONGEST_S
    while not there() and time.monotonic() < last_s:
        time.sleep(0.02)


def executor() -> int:
    """Return the process id of the executor's JVM, the parent of this worker's daemon."""
    pid = os.getppid()
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


if __name__ == "__main__":
    from pyspark.daemon import manager

    disturb(
        Path(os.environ["KEYTAIL_NOTES"]),
        dict(item.split(":") for item in filter(None, os.environ["KEYTAIL_DISTURBED"].split(","))),  # type: ignore[misc]
    )
    manager()
