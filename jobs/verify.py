"""spark-submit entry point of `keytail verify`: the same flags, on the master given to spark-submit.

    spark-submit --master 'local[*]' jobs/verify.py --log-dirs /var/kafka

The hosts of the driver and of every executor must have the log dirs at the same path.
"""

import runpy
from pathlib import Path

if __name__ == "__main__":
    try:
        from keytail.main.main import run_as_job
    except ModuleNotFoundError as missing:
        runpy.run_path(str(Path(__file__).with_name("beside_spark.py")))["restart"](missing.name)
        raise
    run_as_job("verify")
