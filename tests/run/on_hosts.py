"""The driver of a test on a cluster where one host has different files: runs each command on each log dir.

    python -m tests.run.on_hosts MASTER NOTES LOG_DIR...

All commands share one session. In each step, the first task of a host waits for one on the other host, so that both
take part. Prints as JSON, by log dir and command, the status and error of each partition.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from keytail.cli.configuration import read_configuration
from keytail.cli.selection import PartitionFilter
from keytail.compact import execution as compaction
from keytail.rebuild_index import driver as rebuild
from keytail.rebuild_index import tasks as spark_rebuild
from keytail.run import workers
from keytail.run.spark.engine import SparkEngine
from keytail.run.spark.session import local_session
from keytail.verify import driver as spark_verify
from keytail.verify import driver as verification

HOSTS = 2
LONGEST_S = 600.0


def together(notes: str, function: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    (Path(notes) / os.uname().nodename).touch()
    last_s = time.monotonic() + LONGEST_S
    while len(os.listdir(notes)) < HOSTS:
        if time.monotonic() > last_s:
            raise TimeoutError(f"after {LONGEST_S:.0f} s, tasks of {notes} ran only on {os.listdir(notes)}")
        time.sleep(0.02)
    return function(*arguments, **more)


def main() -> None:
    master, notes, *log_dirs = sys.argv[1:]
    spark = local_session(master)
    workers.session_of_run = lambda *args, **more: SparkEngine(spark)  # type: ignore[assignment]
    tasks = [(spark_verify, "verify_on_worker"), (spark_rebuild, "do_on_worker"), (compaction, "clean_on_worker")]
    real = [getattr(module, name) for module, name in tasks]

    def step(name: str, action: Callable[[], Any]) -> dict[str, list[str]]:
        where = Path(notes) / name.replace("/", "_")
        where.mkdir(parents=True)
        for (module, attribute), function in zip(tasks, real, strict=True):
            setattr(module, attribute, partial(together, str(where), function))
        return {row.name: [row.status, row.error] for row in action()}

    answer = {}
    for log_dir in log_dirs:
        partition_filter = PartitionFilter((log_dir,))
        configuration = read_configuration(None, ["orders:cleanup.policy=compact"], topics_have_no_overrides=True)
        indexes = rebuild.Request(partition_filter, configuration, execute=True, master=master)
        cleaning = compaction.Request(
            partition_filter, configuration, execute=True, grouping="kafka", map_memory_bytes=1 << 20, master=master
        )
        verifying = verification.Request(partition_filter, master=master)
        answer[log_dir] = {
            "verify": step(f"{log_dir}-verify", lambda: verification.verify(verifying)),
            "rebuild-index": step(f"{log_dir}-rebuild", lambda: rebuild.rebuild(indexes)),
            "compact": step(f"{log_dir}-compact", lambda: compaction.compact(cleaning)),
        }
    print(json.dumps(answer))
    spark.stop()


if __name__ == "__main__":
    main()
