"""DAG that prepares, stops, compacts, verifies and starts each broker of the inventory in turn, and waits until it is
in sync.

The steps of a broker are a task group, created from the inventory when this file is parsed. Decisions on the output of
commands are in keytail_rolling.py; the commands and the order of tasks are here.

`start` is the teardown of `begin`: Airflow runs it regardless of the results of the tasks in between, even if a worker
died in one of them, or somebody marks the whole run as failed.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import TriggerRule, chain, get_current_context, task, task_group
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

sys.path.insert(0, str(Path(__file__).parent))  # only the root of a bundle is on the path

import keytail_brokers as inventory
import keytail_commands as commands
import keytail_rolling as rolling
import keytail_steps as steps
from keytail_rolling_params import PARAMS

DAG_ID = "keytail_rolling_maintenance"
DOC = """Prepares the compaction of each broker of the inventory (`KEYTAIL_BROKERS`) in turn while it runs, stops it,
commits and verifies the compaction, starts it and waits until it is in sync; then continues with the next one. A broker
that was stopped is always started again, whatever the result of its compaction, unless `verify` reports that a start
would lose records. At any problem the roll stops, and `roll` fails with the broker, the step, and what to do. Details:
`airflow_dags/ROLLING.md`.

| Task | What it does |
|---|---|
| `choose` | selects the brokers; fails if the inventory lacks a command |
| `inventory_is_missing` | the only task if there is no inventory |
| `prepare` | waits as `precheck`, then `keytail compact --prepare` beside the running broker; nothing is replaced |
| `precheck` | waits until no partition is under-replicated, unavailable or at its minimum; nothing is stopped before |
| `begin` | from here on the broker may be down: `start` runs, whatever happens |
| `stop` | runs the inventory's command |
| `stopped` | waits for `.kafka_cleanshutdown` in every log dir and for free locks; otherwise nothing is compacted |
| `compact` | `keytail compact --execute` commits what is prepared and compacts the rest; nothing is retried |
| `verify` | `keytail verify --only-ends` of what was compacted, whatever the result of the compaction |
| `start` | runs the inventory's command, many times if necessary, unless `verify` reports that this loses records |
| `in_sync` | waits until the broker is reachable and no partition is under-replicated or unavailable |
| `downtime` | returns how long the broker was down, and records it in the ledger, if there is one |
| `go_on` | decides whether the next broker may follow |
| `roll` | last task: returns the state of each broker, or fails with the alert |
"""
ALERT, RETRY = "KEYTAIL_ALERT", "KEYTAIL_ROLL_RETRY_SECONDS"
START_TRIES = 5  # attempts of the command in one try of the task
CONFIRM_S = 120.0  # time that a broker may take until it holds the lock of a log dir, and as long until it answers
MOST_PAUSE_S = 1.0  # between two checks whether a broker that was started answers
ASK_S = 300.0  # time that a check, or doctor, may take


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
        if isinstance(problem, inventory.InventoryError) and not retry_inventory:
            raise AirflowFailException(str(problem)) from problem
        raise


def words_of(
    one: inventory.Broker, values: Mapping[str, Any], committed: Sequence[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Return the commands that a run executes for a broker, as lists of words, by step. `committed` are partitions by
    name, if only those are to be verified."""
    topic = ("--topic", values["topic"]) if values["topic"] else ()
    throttle = ("--throttle", values["prepare_throttle"]) if values["prepare_throttle"] else ()
    ledger = ("--ledger", values["ledger"]) if values["ledger"] else ()
    only = ("--prepared-only",) if values["prepared_only"] else ()
    ends = () if values["verify_everything"] else ("--only-ends",)
    named = ("--partitions", ",".join(committed)) if committed and ends else ()
    until = f"{values['prepare_minutes']:g}"
    return {
        "prepare": one.command("compact", *topic, "--deadline", until, *throttle, "--prepare"),
        "doctor": _doctor_words(one),
        "plan": one.command("compact", *topic),
        "stop": one.commands["stop"],
        "compact": one.command(
            "compact", *topic, "--deadline", f"{values['deadline_minutes']:g}", *ledger, "--execute", *only
        ),
        "verify": one.command("verify", *topic, *ends, *named),
        "start": one.commands["start"],
        **{name: one.commands[name] for name in rolling.KNOWN if name in one.commands},
    }


def _doctor_words(one: inventory.Broker) -> tuple[str, ...]:
    """Return the command `doctor` without the inventory's flags, which select topics."""
    return replace(one, flags=()).command("doctor")


def _doctor(one: inventory.Broker) -> commands.Ended:
    try:
        return commands.run(_doctor_words(one), one.on_host, ASK_S)
    except AirflowException as problem:  # no rows, although its status is 0
        return commands.Ended(1, words=str(problem))


def _check(one: inventory.Broker, names: tuple[str, ...]) -> tuple[str, str]:
    """Return the name and the output of the first check that is not good; empty if all are. A missing command fails the
    task."""
    for name in names:
        if name not in one.commands:
            continue
        ended = commands.run(one.commands[name], one.on_host, ASK_S, parse_rows=False, keep_output=True)
        if ended.exit_status in commands.NOT_FOUND:
            raise AirflowFailException(f"commands.{name}: command not found, or not executable: {ended.words}")
        if not rolling.is_good(name, ended.exit_status, ended.output):
            said = rolling.short(ended.output.strip() or ended.words)
            print(f"{name}: status {ended.exit_status}: {said}")
            return name, f"{name} (status {ended.exit_status}): {said}"
    return "", ""


def _wait_until_good(one: inventory.Broker, names: tuple[str, ...], looks: int) -> dict[str, int]:
    """Wait until `reachable` and all checks were good `looks` times in a row; return since when, as far as the checks
    show. Raises AirflowFailException with the last failure."""
    values = steps.given()
    until_s = time.monotonic() + 60 * values["wait_for_sync_minutes"]
    good, found = 0, dict[str, int]()
    while True:
        failing, wrong = _check(one, ("reachable", *names))
        good = 0 if wrong else good + 1
        if failing != "reachable":
            found.setdefault("reachable_at_ms", _now_ms())
        if good == 1:
            found["in_sync_at_ms"] = _now_ms()
        if good >= looks:
            return found
        if time.monotonic() > until_s:
            raise AirflowFailException(
                f"not in sync after {values['wait_for_sync_minutes']:g} minutes: "
                f"{wrong or 'good once, and not checked again'}"
            )
        time.sleep(values["poll_seconds"])


def _skip_if_not_chosen(one: inventory.Broker, values: Mapping[str, Any]) -> None:
    if one.name not in rolling.chosen([known.name for known in inventory.brokers()], values["only_brokers"]):
        raise AirflowSkipException(f"{one.name} is not in only_brokers")


def _prepare(one: inventory.Broker) -> dict[str, Any]:
    values = steps.given()
    _skip_if_not_chosen(one, values)
    if not values["prepare"] or values["dry_run"]:
        raise AirflowSkipException("a dry run prepares nothing" if values["dry_run"] else "prepare is off")
    _wait_until_ready(one)
    limit_s = 60 * (values["prepare_minutes"] + values["overrun_minutes"])
    ended = commands.run(words_of(one, values)["prepare"], one.on_host, limit_s)
    if ended.exit_status == commands.TIMED_OUT:  # what is prepared can be committed
        return commands.summary(ended.rows, 3)
    return commands.outcome(ended)


def _precheck(one: inventory.Broker) -> dict[str, Any] | None:
    values = steps.given()
    _skip_if_not_chosen(one, values)
    if values["dry_run"]:
        return _show(one, values)
    _wait_until_ready(one)
    return None


def _wait_until_ready(one: inventory.Broker) -> None:
    """Wait until no partition of the cluster lacks a replica. Raises AirflowFailException if the broker does not run,
    or keytail cannot."""
    ended = _doctor(one)
    state = rolling.state_of(ended.rows)
    wrong = [f"{row.get('check')}: {row.get('found')}" for row in ended.rows if row.get("status") == "fail"]
    if wrong or not ended.rows:
        raise AirflowFailException(f"keytail is not ready there: {'; '.join(wrong) or rolling.short(ended.words)}")
    if state != rolling.RUNNING:
        raise AirflowFailException(f"the broker is not running (log dirs: {state}); before a roll, start all brokers")
    _wait_until_good(one, rolling.BEFORE, looks=1)


def _show(one: inventory.Broker, values: Mapping[str, Any]) -> dict[str, Any]:
    """Do a dry run: print what would be done, and return what is due there."""
    _, wrong = _check(one, ("reachable", *rolling.BEFORE))
    print(f"{one.name}: " + (f"would wait first: {wrong}" if wrong else "could be stopped now"))
    words = words_of(one, values)
    for step in (*(("prepare",) if values["prepare"] else ()), "stop", "compact", "verify", "start"):
        print(f"{one.name}: would {step}: {shlex.join([*one.on_host, shlex.join(words[step])])}")
    made = commands.outcome(commands.run(words["plan"], one.on_host))
    print(f"{one.name}: {made['counts']}")
    return {"would_wait_for": wrong, **made}


def _stop(one: inventory.Broker, begun_ms: int) -> None:
    """Stop the broker. It is down from now on; in another try of the task perhaps since the first one, which was after
    `begun_ms`."""
    ti: Any = get_current_context()["ti"]
    ti.xcom_push(key="down_at_ms", value=_now_ms() if ti.try_number == 1 else begun_ms)
    ended = commands.run(one.commands["stop"], one.on_host, 60 * steps.given()["stop_minutes"], parse_rows=False)
    if ended.exit_status != 0:
        raise AirflowException(f"commands.stop ended with status {ended.exit_status}: {ended.words}")


def _stopped(one: inventory.Broker) -> dict[str, Any]:
    """Wait until every log dir has its clean shutdown file and its lock is free."""
    values = steps.given()
    until_s = time.monotonic() + 60 * values["stop_minutes"]
    states: list[str] = []
    while True:
        ended = _doctor(one)
        states.append(rolling.state_of(ended.rows))
        print(f"log dirs: {states[-1]}")
        decided = rolling.has_stopped(states)
        if decided is not None:
            get_current_context()["ti"].xcom_push(key="was_down", value=True)
        if decided == rolling.CLEAN:
            return {"state": decided}
        if decided is not None:
            raise AirflowFailException("it ended without a clean shutdown: a log dir has no .kafka_cleanshutdown")
        if time.monotonic() > until_s:
            said = f": {ended.words}" if states[-1] == rolling.UNKNOWN else ""
            raise AirflowFailException(
                f"it has not stopped cleanly after {values['stop_minutes']:g} minutes (log dirs: {states[-1]}){said}"
            )
        time.sleep(values["poll_seconds"])


def _compact(one: inventory.Broker) -> dict[str, Any]:
    values = steps.given()
    limit_s = 60 * (values["deadline_minutes"] + values["overrun_minutes"])
    ended, run_id = steps.run_noting(words_of(one, values)["compact"], one.on_host, limit_s)
    get_current_context()["ti"].xcom_push(key="run_id", value=run_id)
    made = commands.outcome(ended)
    return {**made, "committed": rolling.committed(ended.rows), "prepared": rolling.prepared(ended.rows)}


def _verify(one: inventory.Broker, compacted: Mapping[str, Any] | None) -> dict[str, Any]:
    """Verify the partitions that were compacted. If these are not known, or in another try, before which somebody may
    have moved one of them away, verify all that were chosen."""
    values, ti = steps.given(), get_current_context()["ti"]
    committed = compacted["committed"] if compacted and ti.try_number == 1 else ()
    ended = commands.run(words_of(one, values, committed)["verify"], one.on_host, 60 * values["verify_minutes"])
    said = rolling.verdict(ended.exit_status, ended.rows)
    ti.xcom_push(key="verdict", value=said)
    if said["loses"]:
        raise AirflowFailException(f"a start would lose records: {'; '.join(said['loses'])}")
    if said["bad"]:
        raise AirflowFailException(f"{said['bad_count']} partitions are damaged or unread: {'; '.join(said['bad'])}")
    if not said["ran"] and ended.exit_status == 0:
        return commands.summary([], 0)
    return commands.outcome(ended)


def _start(one: inventory.Broker, said: Mapping[str, Any] | None) -> dict[str, Any]:
    """Start the broker, unless verify reported a loss, and check that it then holds a lock."""
    if not rolling.may_start(said):
        assert said is not None
        raise AirflowFailException(f"{rolling.KEPT}a start would lose records: {'; '.join(said['loses'])}")
    poll_s = steps.given()["poll_seconds"]
    _let_go(one, poll_s)
    for number in range(1, START_TRIES + 1):
        ended = commands.run(one.commands["start"], one.on_host, ASK_S, parse_rows=False)
        if ended.exit_status == 0:
            break
        print(f"commands.start ended with status {ended.exit_status}, try {number} of {START_TRIES}")
        time.sleep(poll_s)
    else:
        raise AirflowException(f"commands.start ended with status {ended.exit_status}: {ended.words}")
    until_s = time.monotonic() + CONFIRM_S
    while True:
        state = rolling.state_of(_doctor(one).rows)
        if state == rolling.RUNNING:
            return {"state": state, "reachable_at_ms": _reachable_at_ms(one, poll_s)}
        if time.monotonic() > until_s:
            if state == rolling.UNKNOWN:  # doctor could not be run; in_sync checks the broker itself
                return {"state": state, "reachable_at_ms": None}
            raise AirflowException(f"commands.start succeeded, but no broker holds its log dirs (state: {state})")
        time.sleep(poll_s)


def _reachable_at_ms(one: inventory.Broker, poll_s: float) -> int | None:
    """Wait until the broker answers, and return when; None if it does not for long: in_sync goes on waiting."""
    until_s = time.monotonic() + CONFIRM_S
    while time.monotonic() < until_s:
        ended = commands.run(one.commands["reachable"], one.on_host, ASK_S, parse_rows=False, keep_output=True)
        if ended.exit_status == 0:
            return _now_ms()
        if ended.exit_status in commands.NOT_FOUND:
            break
        time.sleep(min(poll_s, MOST_PAUSE_S))
    return None


def _downtime(one: inventory.Broker, left: Mapping[str, Any]) -> dict[str, Any]:
    """Return how long the broker was down, and record it in the ledger. Times that are not known are None."""
    values, found = steps.given(), rolling.downtime(left)
    print(f"{one.name}: {rolling.downtime_text(found)}")
    if not values["ledger"] or found["down_at_ms"] is None:
        return {**found, "recorded": False}
    run_id = left.get("run_id")
    words = [one.keytail, "downtime", "--ledger", values["ledger"], "--broker", one.name,
             *rolling.downtime_flags(found), *(("--run", run_id) if run_id else ()), "--output", "json"]  # fmt: skip
    commands.outcome(commands.run(words, one.on_host, ASK_S))
    return {**found, "recorded": True}


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _let_go(one: inventory.Broker, poll_s: float) -> None:
    """Wait until a compaction whose task died has ended (within seconds); until then it holds the locks."""
    until_s = time.monotonic() + CONFIRM_S
    while rolling.state_of(_doctor(one).rows) == rolling.BUSY and time.monotonic() < until_s:
        time.sleep(poll_s)


def _group(group: str, name: str) -> Any:
    """Return the tasks of a broker by step; create their task group."""

    @task_group(group_id=group)
    def of_broker() -> None:
        @task(trigger_rule=TriggerRule.NONE_FAILED, retries=2)
        def prepare() -> Any:
            with _explained():
                return _prepare(inventory.broker(name))

        @task(trigger_rule=TriggerRule.NONE_FAILED, retries=2)
        def precheck() -> Any:
            with _explained():
                return _precheck(inventory.broker(name))

        @task(retries=3)
        def begin() -> int:
            """Mark the point after which the broker may be down: `start` runs whatever happens. Return the time."""
            if steps.given()["dry_run"]:
                raise AirflowSkipException("a dry run stops nothing")
            return _now_ms()

        @task(retries=2)
        def stop() -> None:
            with _explained():
                _stop(inventory.broker(name), get_current_context()["ti"].xcom_pull(task_ids=f"{group}.begin"))

        @task(retries=1)
        def stopped() -> Any:
            with _explained():
                return _stopped(inventory.broker(name))

        @task(retries=0)
        def compact() -> Any:
            with _explained():
                return _compact(inventory.broker(name))

        # Runs regardless of the result of the compaction, but not if there was none.
        @task(trigger_rule=TriggerRule.ALL_DONE_MIN_ONE_SUCCESS, retries=1)
        def verify() -> Any:
            with _explained():
                compacted = get_current_context()["ti"].xcom_pull(task_ids=f"{group}.compact")
                return _verify(inventory.broker(name), compacted)

        @task(retries=20)
        def start() -> Any:
            with _explained(retry_inventory=True):  # the broker is down: somebody may correct the file meanwhile
                said = get_current_context()["ti"].xcom_pull(task_ids=f"{group}.verify", key="verdict")
                return _start(inventory.broker(name), said)

        @task(retries=2)
        def in_sync() -> Any:
            with _explained():
                return _wait_until_good(inventory.broker(name), rolling.AFTER, looks=2)

        # Also for a broker that is down or not in sync, but not if it was not stopped.
        @task(trigger_rule=TriggerRule.ALL_DONE_MIN_ONE_SUCCESS, retries=2)
        def downtime() -> Any:
            with _explained():
                return _downtime(inventory.broker(name), _left_of_downtime(group))

        @task(retries=2)
        def go_on() -> None:
            with _explained():
                left = _left_by(group, {"stopped": "return_value", "compact": "return_value", "verify": "verdict"})
                why = rolling.stops_the_roll(*left, stop_on_damage=steps.given()["stop_on_damage"])
                if why:
                    raise AirflowFailException(f"the broker runs and is in sync, but the roll stops here: {why}")

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
    """Return what these steps of a broker have left under these keys since they were last cleared; None for nothing."""
    pull: Any = get_current_context()["ti"].xcom_pull
    states = _states([f"{group}.{step}" for step in left])
    ended = {"success", "failed"}
    return [
        pull(task_ids=f"{group}.{step}", key=key) if states.get(f"{group}.{step}") in ended else None
        for step, key in left.items()
    ]


def _left_of_downtime(group: str) -> dict[str, Any]:
    """Return what the steps of a broker have left about its downtime; None for what is not known."""
    down_at_ms, was_down, run_id = _left_by(group, {"stop": "down_at_ms", "stopped": "was_down", "compact": "run_id"})
    started, in_sync = _left_by(group, {"start": "return_value", "in_sync": "return_value"})
    started, in_sync = started or {}, in_sync or {}
    return {
        "down_at_ms": down_at_ms if was_down else None,
        "reachable_at_ms": started.get("reachable_at_ms") or in_sync.get("reachable_at_ms"),
        "in_sync_at_ms": in_sync.get("in_sync_at_ms"),
        "run_id": run_id,
    }


def _pages(text: str) -> None:
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
    for group in groups:  # a broker that must stay down is never reported as one to start by hand, whatever was lost
        said = pull(task_ids=f"{group}.verify", key="verdict")
        if states.get(f"{group}.start") == "failed" and not rolling.may_start(said):
            whys[f"{group}.start"] = f"{rolling.KEPT}a start would lose records: {'; '.join(said['loses'])}"
    known: dict[str, inventory.Broker] = {}
    with contextlib.suppress(Exception):  # the report is useful without the commands, too
        known = {one.name: one for one in inventory.brokers()}
    starts = {
        group: shlex.join([*known[name].on_host, shlex.join(known[name].commands["start"])])
        for group, name in groups.items() if name in known
    }  # fmt: skip
    return rolling.ending(groups, states, whys, starts)


def _declare(named: list[str]) -> None:
    groups = dict(zip(rolling.group_ids(named), named, strict=True))

    @task(retries=0)
    def choose() -> list[str]:
        """Return the brokers of this run. Fails if there is a mistake in the inventory or in Params."""
        with _explained():
            known = inventory.brokers()
            names = rolling.chosen([one.name for one in known], steps.given()["only_brokers"])
            wrong = [f"{one.name} {rolling.lacking(one.commands)}" for one in known
                     if one.name in names and rolling.lacking(one.commands)]  # fmt: skip
            if wrong:
                raise AirflowFailException(f"the inventory is not ready for a roll: {'; '.join(wrong)}")
            return names

    @task(trigger_rule=TriggerRule.ALL_DONE, retries=2)
    def roll() -> dict[str, str]:
        """Fail if the roll stopped, with the broker, the step, and what to do."""
        ended = _ending(groups)
        print(dict(ended.brokers))
        if ended.text:
            print(ended.text)
            _pages(ended.text)
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


def _tell(problem: str) -> None:
    @task(retries=0)
    def inventory_is_missing() -> None:
        raise AirflowFailException(problem)

    inventory_is_missing()


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
    try:
        named = [one.name for one in inventory.brokers()]
    except Exception as problem:  # reported by a task, since an import error would hide the DAG
        _tell(str(problem))
        return
    _declare(named)


rolling_maintenance()
