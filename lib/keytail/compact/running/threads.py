"""Determines how many threads each task of a run gets: the cores of this host are divided among the partitions by size.

If each partition had one thread, a run could take as long as its largest partition alone. So the share of the cores
that a partition gets is its share of all bytes, and all partitions end at about the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from keytail.compact.task import CleaningTask
from keytail.run.engine import Engine
from keytail.run.memory import physical_bytes
from keytail.run.watching import HERE

THREAD_BYTES = 512 << 20  # memory of each thread of a task, without the task's map
MIN_BYTES_PER_THREAD = 16 << 20  # with fewer bytes per thread, starting threads takes a noticeable part of the time


def with_threads(tasks: Sequence[CleaningTask], engine: Engine) -> list[CleaningTask]:
    """Return the tasks with their numbers of threads.

    On a Spark cluster each task has one thread, because the driver does not know which cores are idle. A preparation
    has one thread, because a broker runs beside it. No task runs for partitions that are already prepared.
    """
    cores = engine.concurrent_tasks if engine.driver_address == HERE else 1
    sizes = [_cleaned_bytes(task) for task in tasks]
    numbers = threads_of(sizes, cores, physical_bytes())
    return [replace(task, threads=max(task.threads, n)) for task, n in zip(tasks, numbers, strict=True)]


def threads_of(log_bytes: Sequence[int], cores: int, memory_bytes: int) -> list[int]:
    """Return the number of threads for each partition of a run that may use `cores` cores of one host.

    Half of the memory is for maps (run/memory.py); all threads together fit into the other half.
    """
    total = max(1, sum(log_bytes))
    at_a_time = max(1, min(cores, sum(n > 0 for n in log_bytes)))
    fit = memory_bytes // 2 // THREAD_BYTES // at_a_time
    shares = [-(-cores * n // total) for n in log_bytes]
    return [
        max(1, min(share, fit, cores, n // MIN_BYTES_PER_THREAD)) for share, n in zip(shares, log_bytes, strict=True)
    ]


def _cleaned_bytes(task: CleaningTask) -> int:
    """Return the bytes of log that a task reads; 0 if no task runs, or if the task must not use several threads."""
    if task.prepared is not None or task.is_preparation or task.fan_out == "always":
        return 0
    return sum(segment.log_bytes for segment in task.segments)
