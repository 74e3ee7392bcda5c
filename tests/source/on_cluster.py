"""The driver of a test on a cluster: reads a log dir through `kafka-log`, and prints the numbers of rows, tasks, and
distinct offsets as JSON.

python -m tests.source.on_cluster MASTER LOG_DIR
"""

from __future__ import annotations

import json
import sys

from pyspark.sql import functions as F

from keytail.run.spark.session import local_session


def main() -> None:
    master, log_dir = sys.argv[1:]
    spark = local_session(master)
    reader = spark.read.format("kafka-log").option("logDirs", log_dir).option("topic", "t")
    frame = reader.option("columns", "partition,offset").option("sliceBytes", "8000").load()
    rows = frame.withColumn("task", F.spark_partition_id()).collect()
    tasks, places = {row.task for row in rows}, {(row.partition, row.offset) for row in rows}
    print(json.dumps([len(rows), len(tasks), len(places)]))
    spark.stop()


if __name__ == "__main__":
    main()
