"""The work of a task in a compaction: clean a partition with the rate limit and the memory of its host."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from keytail.compact.cleaner import clean_partition
from keytail.compact.task import CleaningResult, CleaningTask
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.pace import Pace, PacedFileSystem
from keytail.log.quiet import QuietFileSystem, let_others_go_first
from keytail.run.hosts import refuse_network_here
from keytail.run.memory import map_memory_bytes
from keytail.run.watching import sending_progress


def clean_on_worker(
    tasks_per_host: int,
    task: CleaningTask,
    attempt: str,
    *,
    shared_storage: bool = False,
    clean: Callable[[FileSystem, Any], CleaningResult] = clean_partition,
) -> CleaningResult:
    """Return what `clean` returns for one task; a map memory of 0 means a share of this host's memory."""
    if not shared_storage:
        refuse_network_here(LOCAL, os.path.dirname(task.partition_path))
    with sending_progress(task.partition_path, attempt):
        return clean(*on_worker(tasks_per_host, task, attempt))


def on_worker(tasks_per_host: int, task: CleaningTask, attempt: str) -> tuple[FileSystem, CleaningTask]:
    """Return the file system with the task's throttle, and the task with this host's share of memory.

    A task of a preparation may run beside a broker, so its file system spares the page cache and the disk.
    """
    fs: FileSystem = LOCAL
    pace = pace_of(tasks_per_host, task)
    if pace is not None:
        fs = PacedFileSystem(pace)
    if task.is_preparation:
        let_others_go_first()
        fs = QuietFileSystem(pace)
    return fs, with_memory(tasks_per_host, task, attempt)


def pace_of(tasks_per_host: int, task: CleaningTask) -> Pace | None:
    """Return the task's share of the rate limit of its host; None if there is no limit."""
    if task.throttle_bytes_per_s is None:
        return None
    return Pace(max(1, task.throttle_bytes_per_s // tasks_per_host))


def with_memory(tasks_per_host: int, task: CleaningTask, attempt: str) -> CleaningTask:
    """Return the task with the `attempt` and, unless it has a map memory already, with a share of this host's
    memory."""
    memory = task.map_memory_bytes or map_memory_bytes(tasks_per_host)
    return replace(task, attempt=attempt, map_memory_bytes=memory)
