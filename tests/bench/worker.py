"""A warm worker: a process that cleans one partition for each request, instead of a worker of Spark. It runs the same
`clean_partition` and `install`, and writes the checkpoint. Requests and answers are lines of JSON; `Worker` is the
client.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from keytail.compact import cleaner
from keytail.compact.cleaner import clean_partition, install
from keytail.compact.task import CleaningTask
from keytail.config.compaction import CompactionConfig
from keytail.log.checkpoint import update_offset
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.log_dirs import survey_log_dirs
from keytail.log.partition import survey_partition
from keytail.log.replacement.freeing import Freeing
from keytail.rebuild_index.tasks import Rebuild
from keytail.run.tasks import keep_freed_memory
from tests.bench.limits import limits
from tests.bench.memory import peak_private
from tests.bench.stage import plans_of

_PIECE_BYTES = 128 << 10
_CORES = os.sched_getaffinity(0)


class Worker:
    """Starts the process; `ask` sends one request to it, and returns the answer."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, command: str, log_dir: Path, **settings: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(
            json.dumps({"command": command, "log_dir": str(log_dir), **settings}),
            file=self._process.stdin,
            flush=True,
        )
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the keytail worker ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class MemoryFiles(FileSystem):
    """A file system with the log in memory: reads copy from there, and writes are discarded.

    `copying_s` is the duration of the copies. The copied pieces fit into the CPU cache, like those of reads from the
    page cache; one large copy would bypass it, and kernels would then wait for memory.
    """

    def __init__(self, partition: Path) -> None:
        super().__init__()
        self.copying_s = 0.0
        self._content = {str(path): np.fromfile(path, np.uint8) for path in partition.glob("*.log")}
        self._open: dict[int, np.ndarray] = {}

    def open_read(self, path: str) -> int:
        fd = super().open_read(path)
        if path in self._content:
            self._open[fd] = self._content[path]
        return fd

    def read_into(self, fd: int, buffer: Any, position: int) -> int:
        if fd not in self._open:
            return super().read_into(fd, buffer, position)
        started = time.perf_counter()
        part = self._open[fd][position : position + len(buffer)]
        for start in range(0, len(part), _PIECE_BYTES):
            buffer[start : min(start + _PIECE_BYTES, len(part))] = part[start : start + _PIECE_BYTES]
        self.copying_s += time.perf_counter() - started
        return len(part)

    def close(self, fd: int) -> None:
        self._open.pop(fd, None)
        super().close(fd)

    def _change(self, operation: str, arguments: tuple[Any, ...], action: Any) -> Any:
        if operation == "create":
            return os.open(os.devnull, os.O_WRONLY)
        return None


class TimedFreeing(Freeing):
    """Adds to the seconds of `unlink` the time for which a replacement waits until all space is freed."""

    def __init__(self, files: TimedFiles, threads: int) -> None:
        super().__init__(files, threads)
        self._seconds = files.seconds

    def __exit__(self, *error: Any) -> None:
        started = time.perf_counter()
        super().__exit__(*error)
        self._seconds["unlink"] += time.perf_counter() - started


class TimedFiles(FileSystem):
    """The real file system, with the seconds of each kind of operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {
            "read": 0.0,
            "write": 0.0,
            "fsync": 0.0,
            "unlink": 0.0,
            "other": 0.0,
        }

    def read_into(self, fd: int, buffer: Any, position: int) -> int:
        with self._timing("read"):
            return super().read_into(fd, buffer, position)

    def _change(self, operation: str, arguments: tuple[Any, ...], action: Any) -> Any:
        with self._timing(operation.removesuffix("_dir")):
            return action()

    @contextmanager
    def _timing(self, operation: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[operation if operation in self.seconds else "other"] += time.perf_counter() - started


def task_of(
    log_dir: str, *, map_memory_bytes: int, segment_bytes: int, first_dirty_offset: int = 0, threads: int = 1
) -> CleaningTask:
    """Return the task for the only partition of a log dir, from the first dirty offset to the active segment."""
    [facts] = survey_log_dirs(LOCAL, [log_dir])
    [entry] = facts.partitions
    partition = survey_partition(LOCAL, facts, entry)
    assert not partition.problems, partition.problems
    return CleaningTask.of(
        partition,
        first_dirty_offset=first_dirty_offset,
        first_uncleanable_offset=partition.segments[-1].base_offset,
        now_ms=time.time_ns() // 1_000_000,
        config=CompactionConfig(cleanup_policy=frozenset({"compact"}), segment_bytes=segment_bytes),
        run_id="bench",
        grouping="kafka",
        map_memory_bytes=map_memory_bytes,
        threads=threads,
    )


def whole_task(log_dir: str, cores: int = 0, **settings: int) -> dict[str, Any]:
    """Measure all work after the survey: read, verify, write, fsync, prove, replace, and write the checkpoint. The
    process uses `cores` cores, or all if this is 0.
    """
    os.sched_setaffinity(0, sorted(_CORES)[: cores or None])
    task = task_of(log_dir, **settings)
    files = TimedFiles()
    with peak_private() as peak:
        started, cpu_before_s = time.perf_counter(), time.process_time()
        result = clean_partition(files, task)
        cleaned = time.perf_counter()
        with mock.patch.object(cleaner, "Freeing", TimedFreeing):
            install(files, task, result)
        key = (task.topic, task.partition)
        checkpoint = os.path.join(log_dir, "cleaner-offset-checkpoint")
        update_offset(files, checkpoint, key, result.end_offset, hosted={key})
        ended = time.perf_counter()
    return {
        "seconds": ended - started,
        "cpu_seconds": time.process_time() - cpu_before_s,
        "phases": {**result.phases_s, "replace": ended - cleaned},
        "file_operations": files.seconds,
        "private_before_bytes": peak.before_bytes,
        "private_peak_bytes": peak.peak_bytes,
        "records_after": result.records_after,
        "end_offset": result.end_offset,
    }


def kernels_alone(log_dir: str, **settings: int) -> dict[str, Any]:
    """Measure the map and write phases on a log in memory: checksum, hash, map, decide, build, index; write nothing."""
    task = task_of(log_dir, **settings)
    files = MemoryFiles(Path(task.partition_path))
    # No output is on disk, so none is proven. (A Mock instead of the lambda would keep `files` in memory.)
    with mock.patch.object(cleaner, "_prove", lambda *args: None):
        phases = clean_partition(files, task).phases_s
    return {"seconds": phases["map"] + phases["write"] - files.copying_s}


def rebuild_indexes(log_dir: str) -> dict[str, Any]:
    """Measure the rebuild of all index files of the only partition of a log dir, after the survey."""
    plans = plans_of(log_dir, execute=True)
    started = time.perf_counter()
    [outcome] = Rebuild(plans).run()
    seconds = time.perf_counter() - started
    if outcome.problem is not None:
        raise outcome.problem
    return {"seconds": seconds}


def main() -> None:
    commands = {"task": whole_task, "kernels": kernels_alone, "limits": limits, "rebuild": rebuild_indexes}
    keep_freed_memory()  # a task's process does the same
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(commands[request.pop("command")](**request)), flush=True)


if __name__ == "__main__":
    main()
