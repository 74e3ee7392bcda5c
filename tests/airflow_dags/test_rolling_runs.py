"""Complete rolling runs by Airflow itself, `dag.test()`, with fake brokers and a fake keytail."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.airflow_dags.conftest import Airflow
from tests.airflow_dags.rolls import write_inventory

# One fixture makes all rolls, which takes minutes on a busy machine.
pytestmark = [pytest.mark.long, pytest.mark.xdist_group("airflow"), pytest.mark.timeout(3600)]

QUICK = {"poll_seconds": 0.05, "stop_minutes": 10, "wait_for_sync_minutes": 10}
# Only for runs whose time must run out; in others, two checks may take seconds on a busy machine.
NO_SYNC = {"wait_for_sync_minutes": 0.02}
LOSES = {
    "kind": "log-start", "severity": "error", "what": "the log start is above the log end", "path": "/logs/b1/x",
    "byte_position": None, "offset": 7, "broker": "Deletes all segments", "remedy": "Correct the entry",
    "start_loses": True,
}  # fmt: skip
HARMLESS = {**LOSES, "kind": "checksum", "what": "a checksum differs", "start_loses": False}
STOPPED = ["prepare", "stop"]
ROUND = [*STOPPED, "compact", "verify", "start"]
LEDGER = {"ledger": "/l"}
RUN_ID = "20260101T000000Z-3f2a91c0"  # printed by the fake keytail


def row(status: str, *findings: Mapping[str, Any]) -> dict[str, Any]:
    return {"topic": "t", "partition": 0, "status": status, "error": "", "findings": list(findings)}


@dataclass(frozen=True)
class Roll:
    """The behaviour of b1 and b2, the Params, and the expected result. Successful cases are combined with failures of
    the other broker, because a rolling run takes seconds.
    """

    events: list[str]
    alert: tuple[str, ...] = ()  # words of the alert; none if the run succeeded
    b1: Mapping[str, Any] = field(default_factory=dict)
    b2: Mapping[str, Any] = field(default_factory=dict)
    conf: Mapping[str, Any] = field(default_factory=dict)
    states: Mapping[str, str] = field(default_factory=dict)
    tries: Mapping[str, int] = field(default_factory=dict)
    # words in the commands "BROKER.COMMAND", in order
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    recorded: tuple[tuple[str, ...], ...] = ()  # the broker, the known times and --run of each downtime


def of(broker: str, *steps: str) -> list[str]:
    return [f"{broker} {step}" for step in steps]


BOTH = [*of("b1", *ROUND), *of("b2", *ROUND)]
ALL_TIMES = ("--down-at", "--reachable-at", "--in-sync-at")
ROLLS: dict[str, Roll] = {
    "success, then a start that fails repeatedly": Roll(
        [*of("b1", *ROUND, "downtime"), *of("b2", *ROUND[:-1], *["start fails"] * 7, "start", "downtime")],
        b2={"start_fails": 7},
        conf={**LEDGER, "topic": "t", "prepare_throttle": "9m"},
        states={"b1.start": "success", "b2.start": "success"},
        tries={"b2.start": 2},  # each try of the task runs the command five times
        words={
            "b1.prepare": ("--topic t", "--deadline 240", "--throttle 9m", "--prepare"),
            "b1.compact": ("--topic t", "--deadline 60", "--ledger /l", "--execute"),
            "b1.verify": ("--topic t", "--only-ends", "--partitions t-0"),
        },
        recorded=(("b1", *ALL_TIMES, "--run"), ("b2", *ALL_TIMES, "--run")),
    ),
    "nothing could be prepared": Roll(
        of("b1", "prepare"),
        ("b1, step prepare", "nothing was done", "Nothing was replaced", "b1 was not touched", "Not touched: b2"),
        b1={"prepare": {"status": 1, "rows": [row("refused")]}},
        conf=LEDGER,
        states={"b1.precheck": "upstream_failed", "b1.start": "upstream_failed", "b1.downtime": "upstream_failed"},
    ),
    "a wrong flag": Roll(
        [], ("b1, step prepare", "wrong usage", "b1 was not touched"), b1={"plan": {"status": 2, "rows": []}}
    ),
    "compaction fails": Roll(
        of("b1", *ROUND),
        ("b1, step compact", "nothing was done", "Broker b1 runs", "the compaction failed", "Not touched: b2"),
        b1={"compact": {"status": 1, "rows": [row("failed")]}},
        states={"b1.compact": "failed", "b1.verify": "success", "b1.start": "success", "b1.in_sync": "success"},
        words={"b1.verify": ("--only-ends",)},  # all partitions are verified
    ),
    "a preparation that takes too long, then a compaction that dies": Roll(
        of("b1", *ROUND[1:]), ("b1, step compact", "signal 9", "Broker b1 runs"),
        b1={"prepare": "hangs", "compact": "dies"},
        conf={"prepare_minutes": 0.02, "overrun_minutes": 0},
        states={"b1.prepare": "success"},
    ),
    "a start would lose records": Roll(
        of("b1", *STOPPED, "compact", "verify", "downtime"),
        ("b1, step verify", "is kept down", LOSES["what"], LOSES["remedy"], "Do not start it", "Not touched: b2"),
        b1={"verify": {"status": 1, "rows": [row("damaged", HARMLESS, LOSES)]}},
        states={"b1.start": "failed", "b1.in_sync": "upstream_failed", "b2.start": "upstream_failed"},
        conf={**LEDGER, "verify_everything": True},
        words={"b1.verify": ()},
        recorded=(("b1", "--down-at", "--run"),),
    ),
    "damage that a start does not worsen": Roll(
        of("b1", *ROUND, "downtime", "downtime"),
        ("b1, step verify", "a checksum differs", "Broker b1 runs", "The downtime of broker b1 is not recorded"),
        conf=LEDGER,
        b1={"downtime": 1, "verify": {"status": 1, "rows": [row("damaged", HARMLESS), row("sound")]}},
    ),
    "harmless damage without a stop, then a refused partition": Roll(
        BOTH,
        b1={
            "prepare": {"status": 3, "rows": [row("prepared"), row("failed")]},
            "verify": {"status": 1, "rows": [row("damaged", HARMLESS), row("sound")]},
        },
        b2={"compact": {"status": 3, "rows": [row("compacted"), row("refused")]}},
        conf={"stop_on_damage": False},
    ),
    "verify dies": Roll(
        of("b1", *STOPPED, "compact", "verify", "verify", "start"),
        ("b1, step verify", "could not be verified", "Broker b1 runs"),
        b1={"verify": "dies"},
        states={"b1.verify": "failed", "b1.start": "success"},
        words={"b1.verify": ("--only-ends",)},  # the second try verifies all partitions
    ),
    "an unclean stop": Roll(
        of("b1", *STOPPED, "start", "downtime"),
        ("b1, step stopped", "without a clean shutdown", "Broker b1 runs"),
        b1={"stop": "unclean"},
        conf=LEDGER,
        recorded=(("b1", *ALL_TIMES),),
        states={"b1.compact": "upstream_failed", "b1.verify": "upstream_failed", "b1.start": "success"},
    ),
    "a stop that hangs": Roll(
        of("b1", *STOPPED, "start"), ("b1, step stopped", "has not stopped cleanly", "running"), b1={"stop": "hangs"},
        conf={**LEDGER, "stop_minutes": 0.2},  # the broker was not seen to be down, so nothing is recorded
        states={"b1.downtime": "success"},
    ),
    "under-replicated before the stop": Roll(
        [],
        ("b1, step precheck", "Topic: t Partition: 0", "Nothing was changed", "b1 was not touched"),
        b1={"wrong": {"under_replicated before": "Topic: t Partition: 0"}},
        conf={**NO_SYNC, "prepare": False},
        states={"b1.precheck": "failed", "b1.start": "upstream_failed", "roll": "failed"},
    ),
    "at min ISR before the stop": Roll(
        [], ("b1, step prepare", "at_min_isr"), b1={"wrong": {"at_min_isr before": "Topic: t"}}, conf=NO_SYNC
    ),
    "a start that never works": Roll(
        of("b1", *ROUND[:-1], *["start fails"] * 10),
        ("b1, step start", "Broker b1 is DOWN", "Start it by hand now", "b1 start"),
        b1={"start_fails": 99},
    ),
    "not in sync in time": Roll(
        of("b1", *ROUND, "downtime"),
        ("b1, step in_sync", "not in sync after", "Topic: t", "Broker b1 runs", "Do not stop another broker"),
        b1={"wrong": {"under_replicated after": "Topic: t"}},
        conf={**NO_SYNC, **LEDGER},
        recorded=(("b1", *ALL_TIMES[:2], "--run"),),
        states={"b2.precheck": "upstream_failed", "b2.stop": "upstream_failed", "b2.start": "upstream_failed"},
    ),
    "only the second broker": Roll(
        of("b2", "stop", *ROUND[1:]), b2={"stop_fails": 1},
        conf={"only_brokers": ["b2"], "prepare": False, "prepared_only": True},
        states={"b1.start": "skipped", "b1.downtime": "skipped", "b2.start": "success", "b2.prepare": "skipped"},
        words={"b2.compact": ("--deadline 60", "--execute", "--prepared-only")},
        tries={"b2.stop": 2},
    ),
    "an unknown broker": Roll([], ("did not begin", "only_brokers has b9"), conf={"only_brokers": ["b9"]}),
    "a dry run": Roll([], conf={"dry_run": True}, states={"b1.precheck": "success", "b2.stop": "skipped"}),
}  # fmt: skip


@pytest.fixture(scope="session")
def rolled(
    request: pytest.FixtureRequest, airflow_runs: Airflow, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Run every rolling run that a test needs once, and return its folder and result."""
    folders, asked = {}, []
    wanted = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.name.startswith("test_a_rolling_run_has_the_expected_result[")
    ]
    for name in wanted:
        roll = ROLLS[name]
        folder = folders[name] = tmp_path_factory.mktemp("roll")
        env = write_inventory(folder, {"b1": roll.b1, "b2": roll.b2})
        (folder / "page").write_text(f'#!/bin/sh\nprintf "%s" "$1" >"{folder}/alert"\n')
        (folder / "page").chmod(0o755)
        env["KEYTAIL_ALERT"] = str(folder / "page")
        asked.append({"env": env, "conf": {**QUICK, **roll.conf}})
    return {name: (folders[name], answer) for name, answer in zip(wanted, airflow_runs.rolls(asked), strict=True)}


@pytest.mark.parametrize("name", ROLLS)
def test_a_rolling_run_has_the_expected_result(rolled: dict[str, tuple[Path, dict[str, Any]]], name: str) -> None:
    folder, answer = rolled[name]
    roll = ROLLS[name]
    events = (folder / "events").read_text().splitlines() if (folder / "events").exists() else []
    assert events == roll.events, answer
    for task, state in roll.states.items():
        assert answer["states"][task] == state, task
    for task, tries in roll.tries.items():
        assert answer["tries"][task] == tries, task
        if task.endswith("stop"):  # the broker may have been down since the first try
            begun = answer["xcoms"][f"{task.removesuffix('stop')}begin return_value"]
            assert answer["xcoms"][f"{task} down_at_ms"] == begun
    for command, words in roll.words.items():
        _, *given = json.loads((folder / command).read_text())
        assert given == ["--log-dirs", f"/logs/{command[:2]}", *" ".join(words).split(), "--output", "json"], command
    ledger = folder / "ledger"
    found = [json.loads(line) for line in ledger.read_text().splitlines()] if ledger.exists() else []
    if "is not recorded" not in " ".join(roll.alert):
        recorded = [(name, *(word for word in words if word in (*ALL_TIMES, "--run"))) for name, *words in found]
        assert recorded == list(roll.recorded)
    for name, _, *words in found:
        flags = dict(zip(words[::2], words[1::2], strict=True))
        times = [int(flags[flag]) for flag in ALL_TIMES if flag in flags]
        assert times == sorted(times)
        assert (flags["--ledger"], flags["--broker"], flags.get("--run", RUN_ID)) == ("/l", name, RUN_ID)
    alert = (folder / "alert").read_text() if (folder / "alert").exists() else ""
    assert bool(alert) == bool(roll.alert), alert
    for words in roll.alert:
        assert words in alert
    assert answer["state"] == ("failed" if roll.alert else "success")
    assert answer["states"]["roll"] == ("failed" if roll.alert else "success")
