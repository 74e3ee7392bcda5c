"""What tests of the roll share: Airflow's environment, which runs rolls, and an inventory of brokers that are none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DAGS = HERE.parents[1] / "airflow_dags"
FILES = ("rolling_maintenance.py", "keytail_brokers.py", "keytail_commands.py", "keytail_rolling.py",
         "keytail_steps.py")  # fmt: skip
COMMANDS = ("stop", "start", "reachable", "under_replicated", "unavailable", "at_min_isr")


def write_inventory(folder: Path, behaviours: Mapping[str, Mapping[str, Any]]) -> Path:
    """Brokers that do as they are told, with commands and a keytail each."""
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


@dataclass(frozen=True)
class Airflow:
    """Its environment and a database; `rolls` runs in one process what it is asked to."""

    bin: Path
    home: Path

    def rolls(self, asked: list[dict[str, Any]], **environ: str) -> list[dict[str, Any]]:
        wanted, answer = self.home / "asked.json", self.home / "answer.json"
        wanted.write_text(json.dumps(asked))
        answer.unlink(missing_ok=True)
        command = [str(self.bin / "python"), str(HERE / "rolls_in_airflow.py"), str(wanted), str(answer)]
        done = subprocess.run(
            command, env={**self.environ, **environ}, capture_output=True, text=True, check=False, timeout=600
        )
        (self.home / "log").write_text(done.stdout + done.stderr)
        assert answer.exists(), f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return json.loads(answer.read_text())

    @property
    def environ(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "AIRFLOW"))}
        return {
            **kept,
            "AIRFLOW_HOME": str(self.home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(self.home / "dags"),
            "KEYTAIL_ROLL_RETRY_SECONDS": "0",
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__UNIT_TEST_MODE": "False",
            "AIRFLOW__LOGGING__LOGGING_LEVEL": "INFO",
        }

    def prepare(self) -> None:
        """A folder of the roll's DAG alone, and a database."""
        (self.home / "dags").mkdir()
        for file in FILES:
            (self.home / "dags" / file).symlink_to(DAGS / file)
        command = [str(self.bin / "airflow"), "db", "migrate"]
        done = subprocess.run(command, env=self.environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
