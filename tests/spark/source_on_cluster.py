"""The driver of a test on a cluster: reads a log dir by `kafka-log`, and prints what it found, by whom, as JSON.

    python -m tests.spark.source_on_cluster MASTER LOG_DIR
"""

from __future__ import annotations

import json
import sys

from pyspark.sql import functions as F

from keytail.spark.session import local_session


def main() -> None:
    master, log_dir = sys.argv[1:]
    spark = local_session(master)
    reader = spark.read.format("kafka-log").option("logDirs", log_dir).option("topic", "t")
    frame = reader.option("columns", "partition,offset").option("sliceBytes", "8000").load()
    tasks = frame.withColumn("task", F.spark_partition_id())
    counts = tasks.agg(F.count("*"), F.countDistinct("task"), F.countDistinct("partition", "offset")).first()
    print(json.dumps(list(counts)))
    spark.stop()


if __name__ == "__main__":
    main()
