"""Restarts a job of this folder whose Python does not have keytail; this is not a job itself."""

import os
import sys
from pathlib import Path


def restart(missing: str) -> None:
    """Restart with the Python beside Spark, if Spark was installed by pip; exit with a message if not.

    spark-submit runs the first `python3` on PATH, which may not have keytail. `missing` is the module that this Python
    lacks.
    """
    home = Path(os.environ.get("SPARK_HOME", ""))
    beside = home.parents[3] / "bin" / "python" if home.parent.name == "site-packages" else None
    was_there = beside is not None and os.environ.get("PYSPARK_DRIVER_PYTHON") == str(beside)
    if beside is None or was_there or not beside.exists() or _is_in(beside):
        sys.exit(
            f"{sys.executable} has no module {missing}; set PYSPARK_PYTHON to the Python in which "
            "keytail is installed, such as .venv/bin/python"
        )
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = str(beside)
    os.execv(beside, [str(beside), *sys.argv])


def _is_in(python: Path) -> bool:
    return os.path.realpath(sys.prefix) == os.path.realpath(python.parents[1])
