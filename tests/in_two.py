"""All tests in two processes, one for each of the two cores that CI has: `make test`.

What the first says is seen at once, what the second says when both are done. The first has most of the folders that
start brokers and Spark, and two more so that both take about as long; the second has all others, new ones too. Options
go to both.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

FIRST = ("tests/bench", "tests/crash", "tests/interop", "tests/spark")
# What they start finds the kernels compiled, once, by the tests before them.
LAST = ("tests/airflow_dags", "tests/app")


def main(options: Sequence[str]) -> int:
    pytest = [sys.executable, "-m", "pytest", *options]
    with tempfile.TemporaryFile() as told:
        second = subprocess.Popen([*pytest, *others()], stdout=told, stderr=subprocess.STDOUT)
        try:
            first_status = subprocess.run([*pytest, *FIRST], check=False).returncode
            second_status = second.wait()
        finally:
            second.kill()
        told.seek(0)
        sys.stdout.buffer.write(told.read())
    statuses = {" ".join(FIRST): first_status, "all other folders": second_status}
    print("\n".join(f"{folders}: {'passed' if status == 0 else 'FAILED'}" for folders, status in statuses.items()))
    return int(any(statuses.values()))


def others() -> list[str]:
    """Folders and files with tests that are not of the first process."""
    found = sorted(str(path) for path in Path("tests").iterdir() if path.match("test_*.py") or _has_tests(path))
    return [path for path in found if path not in (*FIRST, *LAST)] + list(LAST)


def _has_tests(path: Path) -> bool:
    return path.is_dir() and next(path.rglob("test_*.py"), None) is not None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
