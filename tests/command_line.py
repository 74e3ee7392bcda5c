"""Fixtures: the command line, run in this process through typer's runner, and a log dir for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from keytail.main.main import app
from tests.log_dirs import random_records, write_log_dir

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    def invoke(*arguments: str | Path) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})

    return invoke


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    """Write topics `orders` (two partitions) and `users` (one), with four segments per partition."""
    names = ("orders-0", "orders-1", "users-0")
    return write_log_dir(tmp_path / "logs", {name: random_records(n, 400) for n, name in enumerate(names)})


def rows_of(result: Result) -> dict[str, dict[str, Any]]:
    """Return the rows of JSON output of either format, by partition. Raises an exception if standard output contains
    anything else.
    """
    output = json.loads(result.stdout)
    rows = output if isinstance(output, list) else output["rows"]
    return {f"{row['topic']}-{row['partition']}": row for row in rows}
