"""An inventory of fake brokers, for tests of the rolling run."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COMMANDS = ("stop", "start", "reachable", "under_replicated", "unavailable", "at_min_isr")


def write_inventory(folder: Path, behaviours: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write fake brokers, each with commands and a fake keytail, and return the path of their inventory."""
    made = []
    for name, behaviour in behaviours.items():
        (folder / f"{name}.json").write_text(json.dumps(behaviour))
        command = [sys.executable, "-I", "-S", str(HERE / "fake_broker.py"), str(folder), name]
        keytail = folder / f"keytail-{name}"
        keytail.write_text(f'#!/bin/sh\nexec {" ".join(command)} keytail "$@"\n')
        keytail.chmod(0o755)
        made.append(f'[[broker]]\nname = "{name}"\nkeytail = "{keytail}"\nlog_dirs = ["/logs/{name}"]\n')
        made.append("[broker.commands]\n")
        made += [f"{what} = {json.dumps([*command, what])}\n" for what in COMMANDS]
    path = folder / "brokers.toml"
    path.write_text("".join(made))
    return path
