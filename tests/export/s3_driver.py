"""A driver of its own that appends rows to a ledger: python -m tests.export.s3_driver URI NAME ROWS SETTINGS"""

from __future__ import annotations

import json
import sys

from keytail.ledger.write import Ledger
from keytail.run.spark import delta
from keytail.run.spark.engine import SparkEngine
from keytail.run.spark.session import end_jvm, local_session
from tests.run.shared import FOR_SMALL_DATA


def main(uri: str, name: str, rows: str, settings: str) -> None:
    wanted = {**delta.session_settings(None, place=uri), **FOR_SMALL_DATA, **json.loads(settings)}
    session = local_session("local[1]", f"driver {name}", wanted)
    try:
        ledger = Ledger(SparkEngine(session), uri, name)
        ledger.open()
        for number in range(int(rows)):
            ledger.record_downtime(f"{name}-{number}")
    finally:
        session.stop()
        end_jvm()


if __name__ == "__main__":
    main(*sys.argv[1:])
