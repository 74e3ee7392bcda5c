"""Whole rolls by Airflow itself, `dag.test()`, with fake brokers and a fake keytail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.airflow_dags.conftest import Airflow
from tests.airflow_dags.rolls import write_inventory

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("airflow")]

QUICK = {"poll_seconds": 0.05, "stop_minutes": 10, "wait_for_sync_minutes": 10}
# Where the time must run out; elsewhere a busy machine may need seconds for two checks.
NO_SYNC = {"wait_for_sync_minutes": 0.02}
LOSES = {
    "kind": "log-start", "severity": "error", "what": "the log start is above the log end", "path": "/logs/b1/x",
    "byte_position": None, "offset": 7, "broker": "Deletes all segments", "remedy": "Correct the entry",
    "start_loses": True,
}  # fmt: skip
HARMLESS = {**LOSES, "kind": "checksum", "what": "a checksum differs", "start_loses": False}
ROUND = ["stop", "compact", "verify", "start"]


def row(status: str, *findings: Mapping[str, Any]) -> dict[str, Any]:
    return {"topic": "t", "partition": 0, "status": status, "error": "", "findings": list(findings)}


@dataclass(frozen=True)
class Roll:
    """How b1 and b2 behave, with which Params, and the expected result. Successful cases are combined with failures of
    the other broker: a roll takes seconds."""

    events: list[str]
    alert: tuple[str, ...] = ()  # words of its text; none: it succeeded
    b1: Mapping[str, Any] = field(default_factory=dict)
    b2: Mapping[str, Any] = field(default_factory=dict)
    conf: Mapping[str, Any] = field(default_factory=dict)
    states: Mapping[str, str] = field(default_factory=dict)
    tries: Mapping[str, int] = field(default_factory=dict)


def of(broker: str, *steps: str) -> list[str]:
    return [f"{broker} {step}" for step in steps]


BOTH = [*of("b1", *ROUND), *of("b2", *ROUND)]
ROLLS: dict[str, Roll] = {
    "all well, then a start that fails for long": Roll(
        [*BOTH[:-1], *of("b2", *["start fails"] * 7, "start")],
        b2={"start_fails": 7},
        states={"b1.start": "success", "b2.start": "success"},
        tries={"b2.start": 2},  # of the task; each runs the command five times
    ),
    "compaction fails": Roll(
        of("b1", *ROUND),
        ("b1, step compact", "nothing was done", "Broker b1 runs", "the compaction failed", "Not touched: b2"),
        b1={"compact": {"status": 1, "rows": [row("failed")]}},
        states={"b1.compact": "failed", "b1.verify": "success", "b1.start": "success", "b1.in_sync": "success"},
    ),
    "compaction dies": Roll(
        of("b1", *ROUND), ("b1, step compact", "signal 9", "Broker b1 runs"), b1={"compact": "dies"}
    ),
    "a start would lose": Roll(
        of("b1", "stop", "compact", "verify"),
        ("b1, step verify", "is kept down", LOSES["what"], LOSES["remedy"], "Do not start it", "Not touched: b2"),
        b1={"verify": {"status": 1, "rows": [row("damaged", HARMLESS, LOSES)]}},
        states={"b1.start": "failed", "b1.in_sync": "upstream_failed", "b2.start": "upstream_failed"},
    ),
    "damage that a start does not touch": Roll(
        of("b1", *ROUND),
        ("b1, step verify", "a checksum differs", "Broker b1 runs", "stop"),
        b1={"verify": {"status": 1, "rows": [row("damaged", HARMLESS), row("sound")]}},
    ),
    "such damage, and on, then a part that was refused": Roll(
        BOTH,
        b1={"verify": {"status": 1, "rows": [row("damaged", HARMLESS), row("sound")]}},
        b2={"compact": {"status": 3, "rows": [row("compacted"), row("refused")]}},
        conf={"stop_on_damage": False},
    ),
    "verify dies": Roll(
        of("b1", "stop", "compact", "verify", "verify", "start"),
        ("b1, step verify", "could not be verified", "Broker b1 runs"),
        b1={"verify": "dies"},
        states={"b1.verify": "failed", "b1.start": "success"},
    ),
    "an unclean stop": Roll(
        of("b1", "stop", "start"),
        ("b1, step stopped", "without a clean shutdown", "Broker b1 runs"),
        b1={"stop": "unclean"},
        states={"b1.compact": "upstream_failed", "b1.verify": "upstream_failed", "b1.start": "success"},
    ),
    "a stop that hangs": Roll(
        of("b1", "stop", "start"), ("b1, step stopped", "has not stopped cleanly", "running"), b1={"stop": "hangs"},
        conf={"stop_minutes": 0.02},
    ),
    "under-replicated before": Roll(
        [],
        ("b1, step precheck", "Topic: t Partition: 0", "Nothing was changed", "b1 was not touched"),
        b1={"wrong": {"under_replicated before": "Topic: t Partition: 0"}},
        conf=NO_SYNC,
        states={"b1.precheck": "failed", "b1.start": "upstream_failed", "roll": "failed"},
    ),
    "at min ISR before": Roll(
        [], ("b1, step precheck", "at_min_isr"), b1={"wrong": {"at_min_isr before": "Topic: t"}}, conf=NO_SYNC
    ),
    "a start that never works": Roll(
        of("b1", *ROUND[:3], *["start fails"] * 10),
        ("b1, step start", "Broker b1 is DOWN", "Start it by hand now", "b1 start"),
        b1={"start_fails": 99},
    ),
    "not in sync in time": Roll(
        of("b1", *ROUND),
        ("b1, step in_sync", "not in sync after", "Topic: t", "Broker b1 runs", "Do not stop another broker"),
        b1={"wrong": {"under_replicated after": "Topic: t"}},
        conf=NO_SYNC,
        states={"b2.precheck": "upstream_failed", "b2.stop": "upstream_failed", "b2.start": "upstream_failed"},
    ),
    "only the second": Roll(
        of("b2", *ROUND), conf={"only_brokers": ["b2"]}, states={"b1.start": "skipped", "b2.start": "success"}
    ),
    "one that is not there": Roll([], ("did not begin", "only_brokers has b9"), conf={"only_brokers": ["b9"]}),
    "a dry run": Roll([], conf={"dry_run": True}, states={"b1.precheck": "success", "b2.stop": "skipped"}),
}  # fmt: skip


@pytest.fixture(scope="session")
def rolled(
    request: pytest.FixtureRequest, airflow_runs: Airflow, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Run every roll that a test needs, once: return its folder and result."""
    folders, asked = {}, []
    wanted = [item.callspec.params["name"] for item in request.session.items if item.name.startswith("test_a_roll[")]
    for name in wanted:
        roll = ROLLS[name]
        folder = folders[name] = tmp_path_factory.mktemp("roll")
        env = {"KEYTAIL_BROKERS": str(write_inventory(folder, {"b1": roll.b1, "b2": roll.b2}))}
        (folder / "page").write_text(f'#!/bin/sh\nprintf "%s" "$1" >"{folder}/alert"\n')
        (folder / "page").chmod(0o755)
        env["KEYTAIL_ALERT"] = str(folder / "page")
        asked.append({"env": env, "conf": {**QUICK, **roll.conf}})
    return {name: (folders[name], answer) for name, answer in zip(wanted, airflow_runs.rolls(asked), strict=True)}


@pytest.mark.parametrize("name", ROLLS)
def test_a_roll(rolled: dict[str, tuple[Path, dict[str, Any]]], name: str) -> None:
    folder, answer = rolled[name]
    roll = ROLLS[name]
    events = (folder / "events").read_text().splitlines() if (folder / "events").exists() else []
    assert events == roll.events, answer
    for task, state in roll.states.items():
        assert answer["states"][task] == state, task
    for task, tries in roll.tries.items():
        assert answer["tries"][task] == tries, task
    alert = (folder / "alert").read_text() if (folder / "alert").exists() else ""
    assert bool(alert) == bool(roll.alert), alert
    for words in roll.alert:
        assert words in alert
    assert answer["state"] == ("failed" if roll.alert else "success")
    assert answer["states"]["roll"] == ("failed" if roll.alert else "success")
