"""The work of a task of `plan --measure` and `plan --estimate`: reads one partition, sparing the page cache and the
disk for a broker that may run."""

from __future__ import annotations

import random

from keytail.compact.measure.counting import CountingFileSystem
from keytail.compact.measure.estimating import estimate_partition
from keytail.compact.measure.measuring import Measurement, measure_partition
from keytail.compact.task import CleaningTask
from keytail.compact.worker import pace_of, with_memory
from keytail.log.quiet import let_others_go_first
from keytail.run.watching import sending_progress


def measure_on_worker(
    tasks_per_host: int, task: CleaningTask, attempt: str, *, from_a_sample: bool
) -> Measurement:
    """Measure or estimate one partition, with the throttle and the map memory of a task on its host. Writes nothing."""
    let_others_go_first()
    fs = CountingFileSystem(pace_of(tasks_per_host, task))
    task = with_memory(tasks_per_host, task, attempt)
    with sending_progress(task.partition_path, attempt):
        return estimate_partition(fs, task, random.Random()) if from_a_sample else measure_partition(fs, task)
