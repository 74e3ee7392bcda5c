"""Runs keytail's command line in a session with speculative execution, which keytail's own sessions disable.

python -m tests.import_.speculating COMMAND FLAGS...
"""

from __future__ import annotations

import sys

from keytail.main import main as cli
from keytail.run.spark.settings import CORRECTNESS

DUPLICATES = {
    "spark.speculation": "true",
    "spark.speculation.interval": "50ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.1",
    "spark.speculation.minTaskRuntime": "50ms",
}

if __name__ == "__main__":
    CORRECTNESS.update(DUPLICATES)
    cli.main(sys.argv[1:])
