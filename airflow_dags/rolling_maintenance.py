"""DAG that prepares, stops, compacts, verifies and starts each broker of the inventory in turn, and waits until the
broker is in sync.

The steps of a broker are a task group, created from the inventory when this file is parsed. This file defines the order
of the tasks; keytail_provider/rolling_actions.py contains their actions, and keytail_provider/rolling.py their
decisions.

`start` is the teardown of `begin`: Airflow runs it regardless of the results of the tasks in between, even if a worker
died in one of them, or somebody marks the whole run as failed.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import TriggerRule, chain, get_current_context, task, task_group
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

sys.path.insert(0, str(Path(__file__).parent))  # only the root of a bundle is on the path

from keytail_provider import assets, commands, rolling, steps
from keytail_provider import rolling_actions as actions
from keytail_provider.brokers import Broker, InventoryError
from keytail_provider.hooks.keytail import KeytailHook
from keytail_provider.rolling_params import PARAMS

inventory = KeytailHook()
DAG_ID = "keytail_rolling_maintenance"
DOC = """Prepares the compaction of each broker of the inventory (the Connection `keytail_default`) in turn while the
broker runs, stops the broker, commits and verifies the compaction, starts the broker and waits until it is in sync;
then continues with the next broker. A broker that was stopped is always started again, whatever the result of its
compaction, unless `verify` reports that a start would lose records. At any problem the rolling run stops, and `roll`
fails with the broker, the step, and what to do. Details: `airflow_dags/ROLLING.md`.

| Task | What it does |
|---|---|
| `choose` | selects the brokers; fails if the inventory lacks a command |
| `prepare` | waits as `precheck`, then `keytail compact --prepare` beside the running broker; nothing is replaced |
| `precheck` | waits until no partition is under-replicated, unavailable or at its minimum; nothing is stopped before |
| `begin` | from here on the broker may be down: `start` runs, whatever happens |
| `stop` | runs the inventory's command |
| `stopped` | waits for `.kafka_cleanshutdown` in every log dir and for free locks, before which nothing is compacted |
| `compact` | `keytail compact --execute` commits what is prepared and compacts the rest; nothing is retried |
| `verify` | `keytail verify --only-ends` of what was compacted, whatever the result of the compaction |
| `start` | runs the inventory's command, many times if necessary, unless `verify` reports that this loses records |
| `in_sync` | waits until the broker is reachable and no partition is under-replicated or unavailable |
| `downtime` | returns how long the broker was down, and records it in the ledger, if there is one |
| `go_on` | decides whether the next broker may follow |
| `roll` | last task: returns the state of each broker, or fails with the alert |
"""
ALERT, RETRY = "KEYTAIL_ALERT", "KEYTAIL_ROLL_RETRY_SECONDS"


@contextlib.contextmanager
def _explained(*, retry_inventory: bool = False) -> Iterator[None]:
    """Store the reason if the task fails, for the report of the last task. A mistake in the inventory fails the task
    for good, unless `retry_inventory`."""
    try:
        yield
    except AirflowSkipException:
        raise
    except Exception as problem:
        with contextlib.suppress(Exception):
            get_current_context()["ti"].xcom_push(key="why", value=rolling.short(str(problem)))
        if isinstance(problem, InventoryError) and not retry_inventory:
            raise AirflowFailException(str(problem)) from problem
        raise


def _group(group: str, name: str) -> Any:
    """Return the tasks of a broker by step; create their task group."""

    @task_group(group_id=group)
    def of_broker() -> None:
        @task(trigger_rule=TriggerRule.NONE_FAILED, retries=2)
        def prepare() -> Any:
            with _explained():
                return actions.prepare(inventory.broker(name))

        @task(trigger_rule=TriggerRule.NONE_FAILED, retries=2)
        def precheck() -> Any:
            with _explained():
                return actions.precheck(inventory.broker(name))

        @task(retries=3)
        def begin() -> int:
            """Mark the point after which the broker may be down: `start` runs whatever happens. Return the time."""
            if steps.given()["dry_run"]:
                raise AirflowSkipException("a dry run stops nothing")
            return actions.now_ms()

        @task(retries=2)
        def stop() -> None:
            with _explained():
                actions.stop(inventory.broker(name), get_current_context()["ti"].xcom_pull(task_ids=f"{group}.begin"))

        @task(retries=1)
        def stopped() -> Any:
            with _explained():
                return actions.stopped(inventory.broker(name))

        @task(retries=0, outlets=[assets.LEDGERS])
        def compact() -> Any:
            with _explained():
                return actions.compact(inventory.broker(name))

        # Runs regardless of the result of the compaction, but not if there was none.
        @task(trigger_rule=TriggerRule.ALL_DONE_MIN_ONE_SUCCESS, retries=1)
        def verify() -> Any:
            with _explained():
                compacted = get_current_context()["ti"].xcom_pull(task_ids=f"{group}.compact")
                return actions.verify(inventory.broker(name), compacted)

        @task(retries=20)
        def start() -> Any:
            with _explained(retry_inventory=True):  # the broker is down, and the inventory may be corrected
                said = get_current_context()["ti"].xcom_pull(task_ids=f"{group}.verify", key="verdict")
                return actions.start(inventory.broker(name), said)

        @task(retries=2)
        def in_sync() -> Any:
            with _explained():
                return actions.wait_until_good(inventory.broker(name), rolling.AFTER, looks=2)

        # Runs also for a broker that is down or not in sync, but not for a broker that was not stopped.
        @task(trigger_rule=TriggerRule.ALL_DONE_MIN_ONE_SUCCESS, retries=2, outlets=[assets.LEDGERS])
        def downtime() -> Any:
            with _explained():
                return actions.downtime(inventory.broker(name), _left_of_downtime(group))

        @task(retries=2)
        def go_on() -> None:
            with _explained():
                left = _left_by(group, {"stopped": "return_value", "compact": "return_value", "verify": "verdict"})
                why = rolling.stops_the_roll(*left, stop_on_damage=steps.given()["stop_on_damage"])
                if why:
                    raise AirflowFailException(f"the broker runs and is in sync, but the rolling run stops here: {why}")

        made = {one.function.__name__: one() for one in (
            prepare, precheck, begin, stop, stopped, compact, verify, start, in_sync, downtime, go_on
        )}  # fmt: skip
        chain(*(made[step] for step in ("prepare", "precheck", "begin", "stop", "stopped", "compact", "verify")))
        made["stopped"] >> made["verify"] >> made["start"]
        made["start"].as_teardown(setups=made["begin"], on_failure_fail_dagrun=True)
        made["start"] >> made["in_sync"] >> made["go_on"]
        [made["stop"], made["in_sync"]] >> made["downtime"]
        tasks.update(made)

    tasks: dict[str, Any] = {}
    of_broker()
    return tasks


def _states(tasks: list[str]) -> dict[str, str | None]:
    context = get_current_context()
    ti: Any = context["ti"]
    run_id = context["dag_run"].run_id
    found: dict[str, str | None] = ti.get_task_states(dag_id=DAG_ID, task_ids=tasks, run_ids=[run_id]).get(run_id, {})
    return found


def _left_by(group: str, left: Mapping[str, str]) -> list[Any]:
    """Return the values that these steps of a broker have stored under these keys since they were last cleared; None if
    there is no value.
    """
    pull: Any = get_current_context()["ti"].xcom_pull
    states = _states([f"{group}.{step}" for step in left])
    ended = {"success", "failed"}
    return [
        pull(task_ids=f"{group}.{step}", key=key) if states.get(f"{group}.{step}") in ended else None
        for step, key in left.items()
    ]


def _left_of_downtime(group: str) -> dict[str, Any]:
    """Return the values that the steps of a broker have stored about its downtime; a value is None if it is unknown."""
    down_at_ms, was_down, run_id = _left_by(group, {"stop": "down_at_ms", "stopped": "was_down", "compact": "run_id"})
    started, in_sync = _left_by(group, {"start": "return_value", "in_sync": "return_value"})
    started, in_sync = started or {}, in_sync or {}
    return {
        "down_at_ms": down_at_ms if was_down else None,
        "reachable_at_ms": started.get("reachable_at_ms") or in_sync.get("reachable_at_ms"),
        "in_sync_at_ms": in_sync.get("in_sync_at_ms"),
        "run_id": run_id,
    }


def _send_alert(text: str) -> None:
    """Run the command in KEYTAIL_ALERT, if any, with the text as its last argument."""
    words = shlex.split(os.environ.get(ALERT, ""))
    if words:
        with contextlib.suppress(OSError, ValueError):
            commands.run([*words, text], timeout_s=60, parse_rows=False)


def _ending(groups: Mapping[str, str]) -> rolling.Ending:
    pull: Any = get_current_context()["ti"].xcom_pull
    tasks = ["choose", *(f"{group}.{step}" for group in groups for step in rolling.STEPS)]
    states = _states(tasks)
    whys = {name: why for name in tasks if states.get(name) == "failed"
            if (why := pull(task_ids=name, key="why"))}  # fmt: skip
    # A broker that must stay down is never reported as one to start by hand, whatever else was lost.
    for group in groups:
        said = pull(task_ids=f"{group}.verify", key="verdict")
        if states.get(f"{group}.start") == "failed" and not rolling.may_start(said):
            whys[f"{group}.start"] = f"{rolling.KEPT}a start would lose records: {'; '.join(said['loses'])}"
    known: dict[str, Broker] = {}
    with contextlib.suppress(Exception):  # the report is also useful without the commands
        known = {one.name: one for one in inventory.get_conn()}
    starts = {
        group: known[name].host.shown(known[name].commands["start"])
        for group, name in groups.items() if name in known
    }  # fmt: skip
    return rolling.ending(groups, states, whys, starts)


def _declare(named: list[str]) -> None:
    groups = dict(zip(rolling.group_ids(named), named, strict=True))

    @task(retries=0)
    def choose() -> list[str]:
        """Return the brokers of this run. Fails if there is a mistake in the inventory or in Params."""
        with _explained():
            known = inventory.get_conn()
            names = rolling.chosen([one.name for one in known], steps.given()["only_brokers"])
            wrong = [f"{one.name} {rolling.lacking(one.commands)}" for one in known
                     if one.name in names and rolling.lacking(one.commands)]  # fmt: skip
            if wrong:
                raise AirflowFailException(f"the inventory is not ready for a rolling run: {'; '.join(wrong)}")
            return names

    @task(trigger_rule=TriggerRule.ALL_DONE, retries=2)
    def roll() -> dict[str, str]:
        """Fail if the rolling run stopped, with the broker, the step, and what to do."""
        ended = _ending(groups)
        print(dict(ended.brokers))
        if ended.text:
            print(ended.text)
            _send_alert(ended.text)
            raise AirflowFailException(ended.text)
        return dict(ended.brokers)

    first, last = choose(), roll()
    before = first
    for group, name in groups.items():
        tasks = _group(group, name)
        before >> tasks["prepare"]
        before = tasks["go_on"]
        [tasks["start"], tasks["downtime"], before] >> last
    first >> last


@steps.dag(
    DAG_ID,
    PARAMS,
    dag_display_name="keytail: rolling maintenance",
    description="Each broker in turn: prepare, stop, compact, verify, start, wait until in sync",
    doc_md=DOC,
    default_args={"retry_delay": timedelta(seconds=float(os.environ.get(RETRY, "30")))},
    tags=["keytail", "kafka", "rolling"],
)
def rolling_maintenance() -> None:
    # Without the Connection this call fails: Airflow then reports an import error, and keeps the tasks that it knows. A
    # DAG without tasks, while a secrets backend does not answer, would remove `start` from a run that has stopped a
    # broker.
    _declare([one.name for one in inventory.get_conn()])


rolling_maintenance()
