"""Measures compactions of whole log dirs in one warm Spark session: `growth_stage.py CORES WARM LOG_DIR...`. The log
dir WARM is compacted first, so that workers run and kernels are loaded. Prints a line of JSON for each LOG_DIR:
`survey_s` for the survey, and `seconds` for the compaction.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial

from keytail.compact.running.compaction import Compaction
from keytail.compact.running.replacing import InPlace
from keytail.compact.task import CleaningTask
from keytail.compact.worker import clean_on_worker
from keytail.config.compaction import CompactionConfig
from keytail.log.fs import LOCAL
from keytail.log.log_dirs import hosted, survey_log_dirs
from keytail.log.partition import survey_partition
from keytail.run.spark.engine import SparkEngine
from keytail.run.spark.session import end_jvm, local_session
from keytail.run.storage import ScratchSpace

MAP_MEMORY_BYTES = 256 << 20


def compact(engine: SparkEngine, log_dir: str) -> dict[str, float]:
    """Compact all partitions of a log dir, from the log start offset to the active segment, and return the seconds."""
    started_s = time.perf_counter()
    [facts] = survey_log_dirs(LOCAL, [log_dir])
    tasks = []
    for entry in facts.partitions:
        surveyed = survey_partition(LOCAL, facts, entry)
        assert surveyed.problems == ()
        task = CleaningTask.of(
            surveyed,
            first_dirty_offset=surveyed.log_start_offset,
            first_uncleanable_offset=surveyed.segments[-1].base_offset,
            now_ms=time.time_ns() // 1_000_000,
            config=CompactionConfig(cleanup_policy=frozenset({"compact"})),
            run_id="growth",
            grouping="kafka",
            map_memory_bytes=MAP_MEMORY_BYTES,
        )
        tasks.append(task)
    planned_s = time.perf_counter()
    clean = partial(clean_on_worker, engine.concurrent_tasks)
    destination = InPlace(LOCAL, {log_dir: hosted([facts])}, clean)
    rows = Compaction(engine, tasks, ScratchSpace(LOCAL), destination).run()
    ended_s = time.perf_counter()
    assert [row.status for row in rows] == ["compacted"] * len(rows), rows
    return {"partitions": len(rows), "survey_s": planned_s - started_s, "seconds": ended_s - planned_s}


def main() -> None:
    cores, warm, log_dirs = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    spark = local_session(f"local[{cores}]")
    try:
        compact(SparkEngine(spark), warm)
        for log_dir in log_dirs:
            print(json.dumps(compact(SparkEngine(spark), log_dir)), flush=True)
    finally:
        spark.stop()
        end_jvm()


if __name__ == "__main__":
    main()
