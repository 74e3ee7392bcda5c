"""spark-submit entry point of `keytail import`: the same flags, on the master given to spark-submit.

    spark-submit --master 'local[*]' jobs/import_logs.py orders.parquet --topic orders --log-dirs /var/kafka --execute

The hosts of the driver and of every executor must have the source and the log dirs at the same paths.
"""

import runpy
from pathlib import Path

if __name__ == "__main__":
    try:
        from keytail.main.main import run_as_job
    except ModuleNotFoundError as missing:
        runpy.run_path(str(Path(__file__).with_name("beside_spark.py")))["restart"](missing.name)
        raise
    run_as_job("import")
