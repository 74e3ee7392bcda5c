"""Calls a function for each chosen partition: in child processes if there are many partitions, the caller is the main
thread, and the file system is LOCAL; otherwise in this process.

Listing a partition takes as much CPU time as disk time, so threads of one process would wait for each other. On network
storage, processes mostly wait for the storage, so more processes than cores run at a time.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from keytail.errors import KeytailError
from keytail.log.fs import LOCAL, FileSystem
from keytail.log.partition import LogDirFacts, PartitionEntry

A = TypeVar("A")

# Minimum number of partitions for which processes are used: for fewer, processes cost more time than they save.
MANY = 2000
_PARTITIONS_PER_TASK = 250
_PROCESSES_PER_CORE = 2
_MAX_PROCESSES = 32


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable Python's garbage collection within the context: listing a large broker creates a million objects, none of
    which is garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def of_each(
    partitions: Sequence[tuple[LogDirFacts, PartitionEntry]],
    function: Callable[[LogDirFacts, PartitionEntry], A],
    fs: FileSystem = LOCAL,
) -> list[A]:
    """Return the answers of `function` in the order of the partitions; raise its error if it fails. `function` must
    change no file, because it is called again if a process is lost. Answers from processes are pickled; what `function`
    refers to is not."""
    cores = len(os.sched_getaffinity(0))
    is_main = threading.current_thread() is threading.main_thread()
    if len(partitions) < MANY or fs is not LOCAL or not is_main:
        return [function(log_dir, entry) for log_dir, entry in partitions]

    import keytail.log.producers  # noqa: F401, PLC0415 (brings in the kernels: once, and not in each process)
    from keytail.run.processes import Processes  # noqa: PLC0415 (a few partitions need none)
    from keytail.run.tasks import run_attempt  # noqa: PLC0415 (the same)

    def of_some(first: int, attempt: str) -> list[A]:
        return [function(log_dir, entry) for log_dir, entry in partitions[first : first + _PARTITIONS_PER_TASK]]

    answers: list[A] = []
    firsts = range(0, len(partitions), _PARTITIONS_PER_TASK)
    count = min(_PROCESSES_PER_CORE * cores, _MAX_PROCESSES)
    with uncollected(), Processes(count, lambda n, a: run_attempt(of_some, n, a)) as workers:
        for outcome in workers.run(firsts):
            if outcome is None or outcome.value is None:
                raise (outcome and outcome.problem) or KeytailError(
                    "a process that listed partitions was killed twice",
                    remedy="Check the kernel's log: the usual cause is a lack of memory",
                    slug="listing-process-killed",
                )
            answers += outcome.value
    return answers
