"""All tests in two processes, one for each of the two cores that CI has: `make test`.

What the first says is seen at once, what the second says when both are done. The first has the folders that start
brokers and Spark, the second all others, new ones too. Options go to both.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence

FIRST = ("tests/interop", "tests/spark", "tests/kills")


def main(options: Sequence[str]) -> int:
    pytest = [sys.executable, "-m", "pytest", *options]
    with tempfile.TemporaryFile() as told:
        rest = [f"--ignore={folder}" for folder in FIRST]
        second = subprocess.Popen([*pytest, "tests", *rest], stdout=told, stderr=subprocess.STDOUT)
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
