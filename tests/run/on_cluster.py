"""The driver of a test on a cluster: `keytail compact --execute` with speculation on or off, and disturbed tasks.

    python -m tests.run.on_cluster MASTER LOG_DIR NOTES HOW SPECULATION

NOTES is a directory: each attempt of a task leaves an empty file there. With HOW `1:slow`, the task of partition 1
waits for its copy; `1:executor,2:worker` kills processes. Prints the rows and spark.speculation as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from keytail.cli.configuration import read_configuration
from keytail.cli.selection import PartitionFilter
from keytail.compact import execution as compaction
from keytail.compact.cleaner import clean_partition
from keytail.compact.task import CleaningResult, CleaningTask
from keytail.log.fs import LOCAL
from keytail.run import workers
from keytail.run.spark.settings import CORRECTNESS
from tests.import_.speculating import DUPLICATES
from tests.run.disturbed import executor, is_first, wait_for


def clean_disturbed(
    notes: str, how: dict[str, str], tasks_per_host: int, task: CleaningTask, attempt: str, **_: object
) -> CleaningResult:
    """Clean a partition, and return the result. If it is in `how`, its first attempt is disturbed after its writes."""
    number = str(task.partition)
    (Path(notes) / f"{number}.{attempt}.{os.getppid()}").touch()
    result = clean_partition(LOCAL, replace(task, attempt=attempt, map_memory_bytes=1 << 20))
    if number in how and is_first(Path(notes) / f"{number}.first"):
        if how[number] == "slow":  # wait until a copy of this task has ended
            wait_for((Path(notes) / f"{number}.done").exists)
        elif how[number] == "worker":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how[number] == "executor":
            os.kill(executor(), signal.SIGKILL)
            time.sleep(60)  # its daemon ends this process
    (Path(notes) / f"{number}.done").touch()
    return result


def main() -> None:
    master, log_dir, notes, how, speculation = sys.argv[1:]
    if speculation == "forced":
        CORRECTNESS.update(DUPLICATES)
    disturbances = dict(item.split(":") for item in how.split(","))
    compaction.clean_on_worker = partial(clean_disturbed, notes, disturbances)  # type: ignore[assignment]
    settings: dict[str, str] = {}
    real = workers.session_of_run

    def record_settings(*args, **more):
        engine = real(*args, **more)
        settings.update(dict(engine.session.sparkContext.getConf().getAll()))
        return engine

    workers.session_of_run = record_settings  # type: ignore[assignment]
    configuration = read_configuration(None, ["orders:cleanup.policy=compact"], topics_have_no_overrides=True)
    request = compaction.Request(
        PartitionFilter((log_dir,)), configuration, execute=True, master=master, grouping="kafka"
    )
    rows = [replace(row, problem=None) for row in compaction.compact(request)]
    print(json.dumps({"rows": [asdict(row) for row in rows], "speculation": settings.get("spark.speculation")}))


if __name__ == "__main__":
    main()
