"""Code that the DAGs share: Params and the flags derived from them, retries, schedules, the gate, reports of problems.

No task passes a time to keytail: each run uses the clock of its host. A task that is cleared and run again a week later
uses the time of that run, not that of its DAG run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial, wraps
from itertools import chain
from typing import Any

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import Param, TriggerRule, get_current_context
from airflow.sdk import dag as airflow_dag
from airflow.sdk import task as airflow_task
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

from keytail_provider.assets import LEDGERS
from keytail_provider.brokers import HERE, Host, InventoryError
from keytail_provider.commands import MAX_ROWS, Ended, in_words, outcome, run, summary

HOME = os.environ.get("KEYTAIL_HOME", "/opt/keytail")

# All jobs can be repeated: keytail finishes or reverts what a killed run has begun, and does not repeat finished work.
# Retries are for temporary conditions: a lock that is held, a host that is not reached.
DEFAULT_ARGS: dict[str, Any] = {
    "retries": 3,
    "retry_delay": timedelta(minutes=5),
    "retry_exponential_backoff": True,
    "max_retry_delay": timedelta(hours=1),
    "execution_timeout": timedelta(hours=12),
}
SHORT = timedelta(hours=1)
RUN_ID = re.compile(r"ledger: this is run ([0-9A-Za-z-]+)")


def task(function: Callable[..., Any] | None = None, **settings: Any) -> Any:
    """Return Airflow's @task with the result in one XCom (for a dict, Airflow would create one for each key).

    A mistake in the inventory, such as an unknown broker, fails the task for good: a retry would find it again.
    """
    if function is None:
        return partial(task, **settings)

    @wraps(function)
    def run_it(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except InventoryError as mistake:
            raise AirflowFailException(str(mistake)) from mistake

    return airflow_task(run_it, multiple_outputs=False, **settings)


def given() -> Mapping[str, Any]:
    """Return the Params of this run."""
    return get_current_context()["params"]


def left_by(task_id: str) -> dict[str, Any]:
    """Return the XCom of that task for the map index of the current task; empty if there is no such XCom."""
    instance: Any = get_current_context()["ti"]
    return instance.xcom_pull(task_ids=task_id, map_indexes=instance.map_index) or {}


def dag(dag_id: str, declared: Mapping[str, Param], **more: Any) -> Any:
    """Return Airflow's @dag with the settings that all DAGs share.

    The environment of the DAG processor may have a cron expression, in KEYTAIL_COMPACT_BROKERS_SCHEDULE or the like,
    or the name of LEDGERS, for a run after each event of a ledger; and defaults of Params.
    """
    schedule = os.environ.get(f"{dag_id.upper()}_SCHEDULE") or None
    shared = {
        "schedule": LEDGERS if schedule == LEDGERS.name else schedule, "catchup": False, "max_active_runs": 1,
        "default_args": DEFAULT_ARGS, "params": _params(dag_id, declared),
    }  # fmt: skip
    return airflow_dag(dag_id=dag_id, **(shared | more))


def _params(dag_id: str, declared: Mapping[str, Param]) -> dict[str, Param]:
    """Return the Params, with the defaults for scheduled runs in KEYTAIL_COMPACT_BROKERS_PARAMS or the like (JSON)."""
    variable = f"{dag_id.upper()}_PARAMS"
    text = os.environ.get(variable)
    if not text:
        return dict(declared)
    try:
        defaults = json.loads(text)
    except ValueError as problem:
        raise ValueError(f"{variable} is not valid JSON: {problem}") from problem
    if not isinstance(defaults, dict) or defaults.keys() - declared.keys():
        raise ValueError(f"{variable} must be a JSON object with keys among {', '.join(declared)}")
    made = dict(declared)
    for name, value in defaults.items():
        made[name] = Param(value, description=declared[name].description, **declared[name].schema)
        made[name].resolve()  # this raises an error if the value does not match the schema
    return made


def words_param(default: Sequence[str], title: str, description: str) -> Param:
    return Param(list(default), type="array", items={"type": "string"}, title=title, description=description)


def text_param(default: str | None, title: str, description: str, **schema: Any) -> Param:
    kinds: Any = ["null", "string"] if default is None else "string"
    return Param(default, type=kinds, title=title, description=description, **schema)


def brokers_param() -> Param:
    return words_param((), "Brokers", "Names of the inventory, one per line. Empty: all brokers.")


def selection() -> dict[str, Param]:
    """Return the Params that select partitions; without values, they select all partitions."""
    return {
        "topic_list": words_param((), "Topics", "Topics by name, one per line (--topic-list)."),
        "topic": words_param(
            (), "Topics by pattern", "Regular expressions that must match the whole topic name, one per line (--topic)."
        ),
        "partitions": words_param(
            (), "Partitions", "Partitions by name, such as orders-0, one per line (--partitions). A partition "
            "named here that is skipped counts as refused.",
        ),
    }  # fmt: skip


def settings() -> dict[str, Param]:
    """Return the Params for settings of topics in addition to those on disk."""
    return {
        "topic_config": words_param(
            (), "Settings", "[TOPIC:]KEY=VALUE by Kafka's names, one per line (--topic-config)."
        ),
        "topic_configs": text_param(
            None, "Settings of many topics", "File on the host that compacts, with the output of kafka-configs.sh "
            "--describe --entity-type topics --all, or lines TOPIC:KEY=VALUE (--topic-configs).", minLength=1,
        ),
        "topics_have_no_overrides": Param(
            False, type="boolean", title="Topics have no overrides",
            description="Assert that no topic has settings of its own besides those given, if no metadata log has "
            "these settings (--topics-have-no-overrides). cleanup.policy must still be given for each topic.",
        ),
        "metadata_is_current": Param(
            False, type="boolean", title="Metadata is current",
            description="Assert that the metadata log has the current settings, although it looks older than the "
            "data (--metadata-is-current).",
        ),
        "high_watermark": text_param(
            "checkpoint", "High watermark", "log-end asserts that these copies never rejoin a cluster, or that all "
            "replicas were stopped (--high-watermark).", enum=["checkpoint", "log-end"],
        ),
    }  # fmt: skip


def compaction() -> dict[str, Param]:
    """Return the Params for how to compact, and for the gate."""
    return {
        "least_bytes": Param(
            64 << 20, type="integer", minimum=0, title="Gate: bytes",
            description="Skip unless the partitions that are due have this number of cleanable bytes in total.",
        ),
        "least_dirty_ratio": Param(
            0.0, type="number", minimum=0, maximum=1, title="Gate: dirty ratio",
            description="Skip unless at least this share of all bytes of the partitions that are due is dirty. The "
            "min.cleanable.dirty.ratio of each partition applies too.",
        ),
        "force": Param(
            False, type="boolean", title="Force",
            description="Partitions are due regardless of dirty ratio and maximum lag (--force). The gate applies.",
        ),
        "deadline_minutes": Param(
            None, type=["null", "number"], exclusiveMinimum=0, title="Deadline",
            description="Start nothing new after this number of minutes (--deadline); the next run continues.",
        ),
        "throttle": text_param(
            None, "Throttle", "Maximum bytes per second that the tasks of a host read and write, such as 100m "
            "(--throttle).",
            pattern=r"^[0-9.]+ ?[kmgtKMGT]?i?[bB]?$",
        ),
        "ledger": text_param(
            None, "Ledger", "Record of runs (--ledger): a directory on the host that compacts, or s3a://... Empty: "
            "there is no record to read back.", minLength=1,
        ),
        "more_flags": words_param(
            (), "More flags of compact", "One word per line, such as --keep-originals and /var/kafka-originals."
        ),
    }  # fmt: skip


_SELECTS = ("topic_list", "topic", "partitions")
_SETTINGS = ("topic_config", "topic_configs", "metadata_is_current")
_KNOWS = (*_SETTINGS, "topics_have_no_overrides", "high_watermark")
# The Params for which a command has a flag.
FLAGS: dict[str, tuple[str, ...]] = {
    "plan": (*_SELECTS, *_KNOWS, "force"),
    "describe": (*_SELECTS, *_KNOWS),
    "compact": (*_SELECTS, *_KNOWS, "force", "deadline_minutes", "throttle", "ledger", "delta_jars", "more_flags"),
    "verify": _SELECTS,
    "rebuild-index": (*_SELECTS, *_SETTINGS, "truncate", "all", "ledger", "delta_jars"),
    "history": ("ledger", "delta_jars"),
}


def flags(values: Mapping[str, Any], command: str) -> list[str]:
    """Return the flags of a command for the given Params, without Params that are missing or empty."""
    made: list[str] = []
    for name in FLAGS[command]:
        value = values.get(name)
        if value is None or value is False or value in ("", []):
            continue
        if name == "more_flags":
            made += value
        elif name in ("topic_list", "partitions"):
            made += [_flag(name), ",".join(value)]
        elif name == "deadline_minutes":
            made += ["--deadline", f"{value:g}"]
        elif name != "high_watermark" or value != "checkpoint":
            for one in value if isinstance(value, list) else [value]:
                made += [_flag(name)] if one is True else [_flag(name), str(one)]
    return made


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


Command = Callable[..., tuple[str, ...]]
"""The arguments of a command for some log dirs, as by `Broker.command`: its name, then further flags."""


def figures(command: Command, values: Mapping[str, Any], host: Host = HERE) -> dict[str, Any]:
    """Return the figures for the gate: the partitions that are due, from `plan`, and their dirty bytes, from
    `describe`.

    `cleanable_bytes` are the bytes from the first dirty offset, by the cleaner's checkpoint, to the end of what may be
    cleaned, of the partitions that `plan` would compact; `dirty_ratio` is their share of the sum of cleanable and clean
    bytes. Both commands read listings, checkpoints and the ends of indexes, no records.
    """
    planned = run(command("plan", *flags(values, "plan")), host)
    made = outcome(planned)
    described = run(command("describe", *flags(values, "describe")), host)
    outcome(Ended(described.exit_status, described.rows, described.last_lines))
    key = ("log_dir", "topic", "partition")
    due = {tuple(row[part] for part in key) for row in planned.rows if row["status"] == "would-compact"}
    dirty = [row for row in described.rows if tuple(row[part] for part in key) in due]
    cleanable = sum(row["cleanable_bytes"] or 0 for row in dirty)
    clean = sum(row["clean_bytes"] or 0 for row in dirty)
    return {
        **made,
        "due": len(due),
        "cleanable_bytes": cleanable,
        "clean_bytes": clean,
        "dirty_ratio": round(cleanable / (cleanable + clean), 4) if cleanable + clean else 0.0,
    }


def pass_gate(found: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures by which the gate is open. Raises AirflowSkipException with the reason if it is closed."""
    text = (
        f"{found['due']} of {found['partitions']} partitions are due, {found['cleanable_bytes']:,} bytes cleanable "
        f"(minimum {values['least_bytes']:,}), dirty ratio {found['dirty_ratio']:.4f} (minimum "
        f"{values['least_dirty_ratio']})"
    )
    print(text)
    closed = found["cleanable_bytes"] < values["least_bytes"] or found["dirty_ratio"] < values["least_dirty_ratio"]
    if not found["due"] or closed:
        raise AirflowSkipException(f"the gate is closed: {text}")
    return {"why": text}


def read_back(keytail: str, values: Mapping[str, Any], run_id: str | None, host: Host = HERE) -> Any:
    """Return what the ledger contains about a run. Raises AirflowSkipException if there is no ledger, or the run
    printed no id."""
    if not values.get("ledger"):
        raise AirflowSkipException("no ledger was given")
    if run_id is None:
        raise AirflowSkipException("the run printed no id for the ledger")
    words = [keytail, "history", *flags(values, "history"), "--run", run_id, "--output", "json"]
    ended = run(words, host)
    made = outcome(ended)
    if not ended.rows:
        raise AirflowFailException(f"the ledger has no run {run_id}")
    own, *of_run = ended.rows
    kept = ("run_id", "command", "host", "status", "error", "start_ms", "end_ms", "partitions", "counts", "log_dirs")
    stored = {**summary(of_run, ended.exit_status), "run": {key: own.get(key) for key in kept}}
    stored["partial"] = made["partial"] or own.get("status") != "done"
    return stored


def run_with_id(
    words: Sequence[str],
    host: Host = HERE,
    timeout_s: float | None = None,
    on_line: Callable[[str], None] = print,
    parse_rows: bool = True,
) -> tuple[Ended, str | None]:
    """Run a command as `run` does; return also the run's id in the ledger, or None."""
    found: list[str] = []

    def find(line: str) -> None:
        on_line(line)
        found.extend(RUN_ID.findall(line))

    return run(words, host, timeout_s, find, parse_rows), found[-1] if found else None


def of_each(parts: Mapping[str, Callable[[], Ended]], step: str, kind: str = "broker") -> list[dict[str, Any]]:
    """Call the functions of `parts` in order, even if one fails; return their outcomes, with their names as `kind`.

    If any part failed, the error of the task names the failed parts. The task is retried if a retry may help any of
    them; in the parts that succeeded, a retry finds nothing to do.
    """
    outcomes: list[dict[str, Any]] = []
    failed: list[tuple[str, Exception]] = []
    for name, do in parts.items():
        try:
            outcomes.append({kind: name, "step": step, **outcome(do())})
        except (AirflowException, InventoryError) as problem:
            print(f"{name}: {problem}")
            failed.append((name, problem))
    if failed:
        text = "; ".join(f"{name}: {problem}" for name, problem in failed)
        is_final = all(isinstance(problem, (AirflowFailException, InventoryError)) for _, problem in failed)
        raise (AirflowFailException if is_final else AirflowException)(text)
    return outcomes


def end_with(*steps: Any, partial: Sequence[str]) -> None:
    """Add the last two tasks after `steps`: `report_partial`, for the results of the tasks `partial`, and `done`.

    `report_partial` runs regardless of the results of the steps. `done` is the only leaf, by which Airflow judges the
    run: it succeeds after skipped tasks, and is not reached after a failed one.
    """

    @task(trigger_rule=TriggerRule.ALL_DONE, retries=0, execution_timeout=SHORT)
    def report_partial() -> None:
        instance: Any = get_current_context()["ti"]
        report_problems(instance.xcom_pull(task_ids=list(partial)))

    reported = report_partial()
    list(steps) >> reported
    [*steps, reported] >> EmptyOperator(task_id="done", trigger_rule=TriggerRule.NONE_FAILED)


def report_problems(outcomes: Iterable[Any]) -> None:
    """Raise AirflowFailException with the partitions and reasons if a step was done only in part, and
    AirflowSkipException if not.

    If a part of a run was refused or is damaged, the run is not retried, but is not a success either.
    """
    lines: list[str] = []
    for one in chain.from_iterable(one if isinstance(one, list) else [one] for one in outcomes):
        if not one or not one.get("partial"):
            continue
        part = one.get("broker") or one.get("ledger")
        where = f"{part}: " if part else ""
        counts = ", ".join(f"{number} {status}" for status, number in one["counts"].items())
        lines.append(f"{where}{one.get('step', 'a step')} was partial ({counts})")
        wrong = [row for row in one["rows"] if row.get("error") or row.get("first_finding")]
        lines += [f"  {in_words(row)}" for row in wrong]
        if one["rows_left_out"] and len(one["rows"]) >= MAX_ROWS:
            lines.append(f"  {one['rows_left_out']} more rows are not listed here")
        if not wrong and one.get("run"):
            lines.append(f"  the status of run {one['run']['run_id']} in the ledger is {one['run']['status']}")
        elif not wrong:
            lines.append("  all is done, but the ledger lacks it; the next run with this ledger adds what is missing")
    if not lines:
        raise AirflowSkipException("nothing was refused, damaged or failed")
    text = "\n".join(lines)
    print(text)
    raise AirflowFailException(text)
