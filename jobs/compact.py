"""spark-submit entry point of `keytail compact`: the same flags, on the master given to spark-submit.

    spark-submit --master 'local[*]' jobs/compact.py --log-dirs /var/kafka --config server.properties --execute

The hosts of the driver and of every executor must have the log dirs at the same path.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    try:
        from keytail.main.main import run_as_job  # noqa: PLC0415 (may have to restart first)
    except ModuleNotFoundError as missing:
        restart_beside_spark(missing)
        raise
    run_as_job("compact")


def restart_beside_spark(missing: ModuleNotFoundError) -> None:
    """Restart with the Python beside Spark, if Spark was installed by pip; otherwise exit with a message.

    spark-submit runs the first `python3` on PATH, which may not have keytail.
    """
    home = Path(os.environ.get("SPARK_HOME", ""))
    beside = home.parents[3] / "bin" / "python" if home.parent.name == "site-packages" else None
    was_there = beside is not None and os.environ.get("PYSPARK_DRIVER_PYTHON") == str(beside)
    if beside is None or was_there or not beside.exists() or _is_in(beside):
        sys.exit(
            f"{sys.executable} has no module {missing.name}; set PYSPARK_PYTHON to the Python in which "
            "keytail is installed, such as .venv/bin/python"
        )
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = str(beside)
    os.execv(beside, [str(beside), *sys.argv])


def _is_in(python: Path) -> bool:
    return os.path.realpath(sys.prefix) == os.path.realpath(python.parents[1])


if __name__ == "__main__":
    main()
