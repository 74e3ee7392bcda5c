"""Secrets in a command line are masked in the ledger by the same rules as on the page of a report."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from keytail.cli.configuration import read_configuration
from keytail.cli.masking import HIDDEN, masked_arguments
from keytail.ledger import write as of_spark
from keytail.ledger.history import folded_runs
from keytail.ledger.of_run import LedgerFlags, Run, recording
from keytail.ledger.tables import TABLES
from keytail.run.engine import ThisProcess

SECRET = "hunter2"
ARGUMENTS = [
    "compact", "--topic-config", f"ssl.keystore.password={SECRET}", "--output-dir", f"s3a://key:{SECRET}@bucket/t",
    "--access-key", SECRET, "--topic", "orders",
]  # fmt: skip


def test_the_command_line_is_masked_in_the_ledger(tmp_path: Path, monkeypatch: Any) -> None:
    written: list[Any] = []

    class InMemory:
        def __init__(self, spark: Any, path: str, run_id: str, command: str, on_note: Any) -> None:
            self.on_note = on_note

        def open(self) -> None:
            pass

        def begin(self, **run: Any) -> None:
            written.append(run)

        def end(self, rows: Any, status: str, error: str = "") -> None:
            written.append(error)

    monkeypatch.setattr(of_spark, "Ledger", InMemory)
    monkeypatch.setattr(sys, "argv", ["keytail", *ARGUMENTS])
    notes: list[str] = []
    configuration = read_configuration(None, [], False)
    about = Run("compact", "run", 0, [str(tmp_path)], configuration)
    run = recording(LedgerFlags(f"s3a://key:{SECRET}@bucket/ledger"), ThisProcess(), about, on_note=notes.append)
    with pytest.raises(OSError), run:
        raise OSError(f"s3a://key:{SECRET}@bucket/t is not there")
    assert written[0]["arguments"] == masked_arguments(ARGUMENTS)
    assert written[0]["arguments"].count(HIDDEN) == 1 and "orders" in written[0]["arguments"]
    assert SECRET not in json.dumps(written, default=str)
    assert SECRET not in "".join(notes)


def test_history_masks_command_lines_of_older_runs() -> None:
    at = datetime.datetime.fromtimestamp(0, datetime.UTC)
    row: dict[str, Any] = dict.fromkeys(TABLES["runs"]) | {"run_id": "one", "event": "intent", "at": at}
    row["arguments"] = ARGUMENTS
    [run] = folded_runs([row])
    assert run.arguments == tuple(masked_arguments(ARGUMENTS))
