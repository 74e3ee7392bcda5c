"""An inventory of fake brokers, for tests of the rolling run."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COMMANDS = ("stop", "start", "reachable", "under_replicated", "unavailable", "at_min_isr")


def connection(*brokers: Mapping[str, Any]) -> dict[str, str]:
    """Return the variable of the Connection with these brokers."""
    made = {"conn_type": "keytail", "extra": {"brokers": brokers}}
    return {"AIRFLOW_CONN_KEYTAIL_DEFAULT": json.dumps(made)}


def write_inventory(folder: Path, behaviours: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Write fake brokers, each with commands and a fake keytail, and return the variable of their Connection."""
    made: list[dict[str, Any]] = []
    for name, behaviour in behaviours.items():
        (folder / f"{name}.json").write_text(json.dumps(behaviour))
        command = [sys.executable, "-I", "-S", str(HERE / "fake_broker.py"), str(folder), name]
        keytail = folder / f"keytail-{name}"
        keytail.write_text(f'#!/bin/sh\nexec {" ".join(command)} keytail "$@"\n')
        keytail.chmod(0o755)
        commands = {what: [*command, what] for what in COMMANDS}
        made.append({"name": name, "keytail": str(keytail), "log_dirs": [f"/logs/{name}"], "commands": commands})
    return connection(*made)
