"""The actions of the tasks of a rolling run (rolling_maintenance.py) at a broker: they run the broker's commands and
keytail's, and wait.

Decisions on the output of commands are in rolling.py.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from airflow.sdk import get_current_context
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

from keytail_provider import assets, commands, rolling, steps
from keytail_provider.brokers import Broker
from keytail_provider.hooks.keytail import KeytailHook

START_TRIES = 5  # runs of the command in one try of the task
CONFIRM_S = 120.0  # time that a broker may take until it holds the lock of a log dir, and then until it answers
MAX_PAUSE_S = 1.0  # seconds between two checks whether a broker that was started answers
ASK_S = 300.0  # time that a check, or doctor, may take


def words_of(
    one: Broker, values: Mapping[str, Any], to_verify: Sequence[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Return the commands that a run executes for a broker, as lists of words, by step. `verify` is limited to the
    partitions `to_verify`, unless this list is empty or `verify_everything` is set."""
    topic = ("--topic", values["topic"]) if values["topic"] else ()
    throttle = ("--throttle", values["prepare_throttle"]) if values["prepare_throttle"] else ()
    ledger = ("--ledger", values["ledger"]) if values["ledger"] else ()
    only = ("--prepared-only",) if values["prepared_only"] else ()
    ends = () if values["verify_everything"] else ("--only-ends",)
    named = ("--partitions", ",".join(to_verify)) if to_verify and ends else ()
    until = f"{values['prepare_minutes']:g}"
    return {
        "prepare": one.command("compact", *topic, "--deadline", until, *throttle, "--prepare"),
        "doctor": _doctor_words(one),
        "plan": one.command("compact", *topic, *ledger),
        "stop": one.commands["stop"],
        "compact": one.command(
            "compact", *topic, "--deadline", f"{values['deadline_minutes']:g}", *ledger, "--execute", *only
        ),
        "verify": one.command("verify", *topic, *ends, *named),
        "start": one.commands["start"],
        **{name: one.commands[name] for name in rolling.KNOWN if name in one.commands},
    }


def _doctor_words(one: Broker) -> tuple[str, ...]:
    """Return the command `doctor` without the inventory's flags, which select topics."""
    return replace(one, flags=()).command("doctor")


def _doctor(one: Broker) -> commands.Ended:
    try:
        return commands.run(_doctor_words(one), one.host, ASK_S)
    except AirflowException as problem:  # the command printed no rows, although its status is 0
        return commands.Ended(1, last_lines=str(problem))


def _check(one: Broker, names: tuple[str, ...]) -> tuple[str, str]:
    """Return the name and the output of the first check that is not good; empty if all checks are good. A missing
    command fails the task."""
    for name in names:
        if name not in one.commands:
            continue
        ended = commands.run(one.commands[name], one.host, ASK_S, parse_rows=False, keep_output=True)
        if ended.exit_status in commands.NOT_FOUND:
            raise AirflowFailException(f"commands.{name}: command not found, or not executable: {ended.last_lines}")
        if not rolling.is_good(name, ended.exit_status, ended.output):
            said = rolling.short(ended.output.strip() or ended.last_lines)
            print(f"{name}: status {ended.exit_status}: {said}")
            return name, f"{name} (status {ended.exit_status}): {said}"
    return "", ""


def wait_until_good(one: Broker, names: tuple[str, ...], looks: int) -> dict[str, int]:
    """Wait until `reachable` and all checks were good `looks` times in a row; return the times at which checks first
    showed this (`reachable_at_ms`, `in_sync_at_ms`). Raises AirflowFailException with the last failure."""
    values = steps.given()
    until_s = time.monotonic() + 60 * values["wait_for_sync_minutes"]
    good, found = 0, dict[str, int]()
    while True:
        failing, wrong = _check(one, ("reachable", *names))
        good = 0 if wrong else good + 1
        if failing != "reachable":
            found.setdefault("reachable_at_ms", now_ms())
        if good == 1:
            found["in_sync_at_ms"] = now_ms()
        if good >= looks:
            return found
        if time.monotonic() > until_s:
            raise AirflowFailException(
                f"not in sync after {values['wait_for_sync_minutes']:g} minutes: "
                f"{wrong or 'good once, and not checked again'}"
            )
        time.sleep(values["poll_seconds"])


def _skip_if_not_chosen(one: Broker, values: Mapping[str, Any]) -> None:
    if one.name not in rolling.chosen([known.name for known in KeytailHook().get_conn()], values["only_brokers"]):
        raise AirflowSkipException(f"{one.name} is not in only_brokers")


def prepare(one: Broker) -> dict[str, Any]:
    values = steps.given()
    _skip_if_not_chosen(one, values)
    if not values["prepare"] or values["dry_run"]:
        raise AirflowSkipException("a dry run prepares nothing" if values["dry_run"] else "prepare is off")
    _try_flags(one, values)
    _wait_until_ready(one)
    limit_s = 60 * (values["prepare_minutes"] + values["overrun_minutes"])
    ended = commands.run(words_of(one, values)["prepare"], one.host, limit_s)
    if ended.exit_status == commands.TIMED_OUT:  # prepared files can still be committed
        return commands.summary(ended.rows, 3)
    return commands.outcome(ended)


def precheck(one: Broker) -> dict[str, Any] | None:
    values = steps.given()
    _skip_if_not_chosen(one, values)
    if values["dry_run"]:
        return _show(one, values)
    if not values["prepare"]:
        _try_flags(one, values)
    _wait_until_ready(one)
    return None


def _try_flags(one: Broker, values: Mapping[str, Any]) -> None:
    """Do a dry run, which finds wrong flags in the inventory, topics and ledgers before the broker is stopped."""
    commands.outcome(commands.run(words_of(one, values)["plan"], one.host))


def _wait_until_ready(one: Broker) -> None:
    """Wait until the checks `rolling.BEFORE` find nothing. Raises AirflowFailException if the broker does not run, or
    keytail cannot, or the checks still find something after `wait_for_sync_minutes`."""
    ended = _doctor(one)
    state = rolling.state_of(ended.rows)
    wrong = [f"{row.get('check')}: {row.get('found')}" for row in ended.rows if row.get("status") == "fail"]
    if wrong or not ended.rows:
        raise AirflowFailException(f"keytail is not ready there: {'; '.join(wrong) or rolling.short(ended.last_lines)}")
    if state != rolling.RUNNING:
        raise AirflowFailException(
            f"the broker is not running (log dirs: {state}); before a rolling run, start all brokers"
        )
    wait_until_good(one, rolling.BEFORE, looks=1)


def _show(one: Broker, values: Mapping[str, Any]) -> dict[str, Any]:
    """Do a dry run: print what would be done, and return what is due on the broker."""
    _, wrong = _check(one, ("reachable", *rolling.BEFORE))
    print(f"{one.name}: " + (f"would wait first: {wrong}" if wrong else "could be stopped now"))
    words = words_of(one, values)
    for step in (*(("prepare",) if values["prepare"] else ()), "stop", "compact", "verify", "start"):
        print(f"{one.name}: would {step}: {one.host.shown(words[step])}")
    made = commands.outcome(commands.run(words["plan"], one.host))
    print(f"{one.name}: {made['counts']}")
    return {"would_wait_for": wrong, **made}


def stop(one: Broker, begun_ms: int) -> None:
    """Stop the broker. The broker is down from now on or, in another try of the task, perhaps since the first try,
    which was after `begun_ms`.
    """
    ti: Any = get_current_context()["ti"]
    ti.xcom_push(key="down_at_ms", value=now_ms() if ti.try_number == 1 else begun_ms)
    ended = commands.run(one.commands["stop"], one.host, 60 * steps.given()["stop_minutes"], parse_rows=False)
    if ended.exit_status != 0:
        raise AirflowException(f"commands.stop ended with status {ended.exit_status}: {ended.last_lines}")


def stopped(one: Broker) -> dict[str, Any]:
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
            said = f": {ended.last_lines}" if states[-1] == rolling.UNKNOWN else ""
            raise AirflowFailException(
                f"it has not stopped cleanly after {values['stop_minutes']:g} minutes (log dirs: {states[-1]}){said}"
            )
        time.sleep(values["poll_seconds"])


def compact(one: Broker) -> dict[str, Any]:
    values = steps.given()
    limit_s = 60 * (values["deadline_minutes"] + values["overrun_minutes"])
    ended, run_id = steps.run_with_id(words_of(one, values)["compact"], one.host, limit_s)
    get_current_context()["ti"].xcom_push(key="run_id", value=run_id)
    made = commands.outcome(ended)
    assets.add_event(values["ledger"], one.name, "compact", run_id)
    return {**made, "to_verify": rolling.to_verify(ended.rows), "prepared": rolling.prepared(ended.rows)}


def verify(one: Broker, compacted: Mapping[str, Any] | None) -> dict[str, Any]:
    """Verify the partitions that were compacted, or failed. If these partitions are not known, or in another try,
    before which somebody may have moved a partition away, verify all chosen partitions."""
    values, ti = steps.given(), get_current_context()["ti"]
    named = compacted["to_verify"] if compacted and ti.try_number == 1 else ()
    ended = commands.run(words_of(one, values, named)["verify"], one.host, 60 * values["verify_minutes"])
    said = rolling.verdict(ended.exit_status, ended.rows)
    ti.xcom_push(key="verdict", value=said)
    if said["loses"]:
        raise AirflowFailException(f"a start would lose records: {'; '.join(said['loses'])}")
    if said["bad"]:
        raise AirflowFailException(f"{said['bad_count']} partitions are damaged or unread: {'; '.join(said['bad'])}")
    if not said["ran"] and ended.exit_status == 0:
        return commands.summary([], 0)
    return commands.outcome(ended)


def start(one: Broker, said: Mapping[str, Any] | None) -> dict[str, Any]:
    """Start the broker, unless verify reported a loss, and check that the broker then holds a lock."""
    if not rolling.may_start(said):
        assert said is not None
        raise AirflowFailException(f"{rolling.KEPT}a start would lose records: {'; '.join(said['loses'])}")
    poll_s = steps.given()["poll_seconds"]
    _let_go(one, poll_s)
    for number in range(1, START_TRIES + 1):
        ended = commands.run(one.commands["start"], one.host, ASK_S, parse_rows=False)
        if ended.exit_status == 0:
            break
        print(f"commands.start ended with status {ended.exit_status}, try {number} of {START_TRIES}")
        time.sleep(poll_s)
    else:
        raise AirflowException(f"commands.start ended with status {ended.exit_status}: {ended.last_lines}")
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


def _reachable_at_ms(one: Broker, poll_s: float) -> int | None:
    """Wait until the broker answers, and return the time; None if this takes too long: `in_sync` then continues to
    wait.
    """
    until_s = time.monotonic() + CONFIRM_S
    while time.monotonic() < until_s:
        ended = commands.run(one.commands["reachable"], one.host, ASK_S, parse_rows=False, keep_output=True)
        if ended.exit_status == 0:
            return now_ms()
        if ended.exit_status in commands.NOT_FOUND:
            break
        time.sleep(min(poll_s, MAX_PAUSE_S))
    return None


def downtime(one: Broker, left: Mapping[str, Any]) -> dict[str, Any]:
    """Return how long the broker was down, and record it in the ledger. Times that are not known are None."""
    values, found = steps.given(), rolling.downtime(left)
    print(f"{one.name}: {rolling.downtime_text(found)}")
    if not values["ledger"] or found["down_at_ms"] is None:
        return {**found, "recorded": False}
    run_id = left.get("run_id")
    words = [one.keytail, "downtime", "--ledger", values["ledger"], "--broker", one.name,
             *rolling.downtime_flags(found), *(("--run", run_id) if run_id else ()), "--output", "json"]  # fmt: skip
    commands.outcome(commands.run(words, one.host, ASK_S))
    assets.add_event(values["ledger"], one.name, "downtime", run_id)
    return {**found, "recorded": True}


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def _let_go(one: Broker, poll_s: float) -> None:
    """Wait until a compaction whose task died has ended (within seconds); until then it holds the locks."""
    until_s = time.monotonic() + CONFIRM_S
    while rolling.state_of(_doctor(one).rows) == rolling.BUSY and time.monotonic() < until_s:
        time.sleep(poll_s)
