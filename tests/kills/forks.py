"""Runs of `compact` in forked children that are killed at random moments: a kill takes only milliseconds. The complete
command is run: locks, decisions, recovery, bundles from several threads, tasks, replacement and checkpoint.
Functions for workers of Spark are called in the same process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from keytail.cli.configuration import read_configuration
from keytail.cli.selection import PartitionFilter
from keytail.compact import steps, worker
from keytail.compact.command import Request
from keytail.compact.execution import compact
from keytail.compact.write_phase import passes
from keytail.log.fs import LOCAL, FileSystem
from keytail.run.rows import ResultRow
from tests.crash.compactions import NOW, LogDir
from tests.kills.logs import topic_config
from tests.run.engines import LikeSpark


class SlowFileSystem(FileSystem):
    """Waits `pause_s` before each change, so that most kills occur between changes."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self.pause_s = pause_s

    def _change(self, operation: str, arguments: tuple[Any, ...], action: Callable[[], Any]) -> Any:
        time.sleep(self.pause_s)
        return super()._change(operation, arguments, action)


def compact_here(
    log_dir: LogDir, root: Path, *, fs: FileSystem = LOCAL, max_scratch_bytes: int | None = None
) -> list[ResultRow]:
    """Run `keytail compact --execute` in this process, two tasks at a time, and return the rows."""
    configuration = read_configuration(None, topic_config(log_dir), topics_have_no_overrides=True)
    request = Request(
        PartitionFilter((str(root),)), configuration, execute=True, now_ms=NOW, unsafe_clock=True, force=True,
        grouping="kafka", map_memory_bytes=1 << 20, max_scratch_bytes=max_scratch_bytes,
    )  # fmt: skip
    with _without_spark(fs):
        return compact(request, fs)


@contextlib.contextmanager
def _without_spark(fs: FileSystem) -> Iterator[None]:
    """Replace Spark, and set the size margin to 0, so that partitions of a few KiB are compacted in passes."""
    with (
        patch.object(steps, "workers_of_run", lambda *_, **__: LikeSpark()),
        patch.object(worker, "LOCAL", fs),  # the file system of the tasks
        patch.object(passes, "_MARGIN_BYTES", 0),
    ):
        yield


def run_in_child(action: Callable[[], object], kill_after_s: float | None) -> bool:
    """Run `action` in a child. Return whether it was killed, or False if it had ended successfully before."""
    output = os.memfd_create("output")
    child = os.fork()
    if child == 0:
        _run_child(action, output)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with os.fdopen(output, "rb") as file:
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL, f"the run was killed by signal {os.WTERMSIG(status)}"
            return True
        file.seek(0)
        assert os.WEXITSTATUS(status) == 0, f"the run failed before the kill: {file.read().decode()}"
    return False


def _run_child(action: Callable[[], object], output: int) -> None:
    status = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = open(output, "w", buffering=1, closefd=False)
        action()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
