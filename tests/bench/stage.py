"""Measures a check of the indexes of a log dir in a warm Spark session with this number of cores: `stage.py CORES
LOG_DIR`.
"""

from __future__ import annotations

import json
import sys
import time

from keytail.log.fs import LOCAL
from keytail.log.log_dirs import survey_log_dirs
from keytail.log.partition import survey_partition
from keytail.rebuild_index.partition import PartitionPlan, RebuildSettings, plan_partition
from keytail.rebuild_index.tasks import Rebuild
from keytail.run.spark.engine import SparkEngine
from keytail.run.spark.session import end_jvm, local_session


def plans_of(log_dir: str, *, execute: bool = False) -> list[PartitionPlan]:
    [facts] = survey_log_dirs(LOCAL, [log_dir])
    plans = []
    for entry in facts.partitions:
        surveyed = survey_partition(LOCAL, facts, entry)
        assert surveyed.problems == ()
        plans.append(
            plan_partition(
                LOCAL,
                surveyed,
                RebuildSettings(
                    index_interval_bytes=4096,
                    segment_index_bytes=10_485_760,
                    rebuild_all=True,
                    execute=execute,
                    run_id="bench",
                ),
            )
        )
    return plans


def main() -> None:
    cores, log_dir = int(sys.argv[1]), sys.argv[2]
    plans = plans_of(log_dir)
    spark = local_session(f"local[{cores}]")
    try:
        for some in (plans[: 2 * cores], plans[: 2 * cores]):  # start workers and load kernels
            Rebuild(some, SparkEngine(spark)).run()
        started = time.perf_counter()
        outcomes = Rebuild(plans, SparkEngine(spark)).run()
        seconds = time.perf_counter() - started
        assert all(outcome.problem is None for outcome in outcomes)
    finally:
        spark.stop()
        end_jvm()
    print(json.dumps({"seconds": seconds, "bytes": sum(plan.facts.log_bytes for plan in plans)}))


if __name__ == "__main__":
    main()
