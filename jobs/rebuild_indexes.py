"""spark-submit entry point of `keytail rebuild-index`: the same flags, on the master given to spark-submit.

    spark-submit --master 'local[*]' jobs/rebuild_indexes.py --log-dirs /var/kafka --config server.properties --execute

The hosts of the driver and of every executor must have the log dirs at the same path.
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
    run_as_job("rebuild-index")


if __name__ == "__main__":
    main()
