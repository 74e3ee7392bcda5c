"""spark-submit entry point of `keytail export`: the same flags, on the master given to spark-submit.

    spark-submit --properties-file conf/spark-delta.conf jobs/export.py --log-dirs /var/kafka --topic-list users \
        --to /lake/kafka --execute

The hosts of the driver and of every executor must have the log dirs and the tables at the same paths.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    try:
        from keytail.main.main import run_as_job  # noqa: PLC0415 (may have to restart first)
    except ModuleNotFoundError as missing:
        sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out
        from compact import restart_beside_spark  # noqa: PLC0415 (the job beside this one)

        restart_beside_spark(missing)
        raise
    run_as_job("export")


if __name__ == "__main__":
    main()
