"""DAG that rebuilds missing or wrong index files of all brokers, with one task per broker or group of brokers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import Param, chain, task_group
from airflow.sdk.exceptions import AirflowException, AirflowFailException

sys.path.insert(0, str(Path(__file__).parent))  # only the root of a bundle is on the path

import keytail_brokers as inventory
import keytail_commands as commands
import keytail_steps as steps

_DAG = "keytail_index_rebuild"
NAMED = "{{ ', '.join(task.op_kwargs['names']) }}"


def of_each(names: list[str], step: str, do: Callable[[inventory.Broker], commands.Ended]) -> list[dict[str, Any]]:
    """Process the brokers one after the other, even if one fails, and return the outcome of each.

    If any failed, the error of the task names them. The task is retried if a retry may help any of them; on the brokers
    that succeeded, a retry finds nothing to do.
    """
    outcomes: list[dict[str, Any]] = []
    failed: list[tuple[str, AirflowException]] = []
    for name in names:
        try:
            ended = do(inventory.broker(name))
            outcomes.append({"broker": name, "step": step, **commands.outcome(ended)})
        except AirflowException as problem:
            print(f"{name}: {problem}")
            failed.append((name, problem))
    if failed:
        text = "; ".join(f"{name}: {problem}" for name, problem in failed)
        is_final = all(isinstance(problem, AirflowFailException) for _, problem in failed)
        raise (AirflowFailException if is_final else AirflowException)(text)
    return outcomes


@steps.dag(
    _DAG,
    {
        "brokers": steps.brokers_param(),
        "by": steps.text_param(
            "broker", "A task for each", "group: one task for the brokers of a group, one after the other, for "
            "hosts that share disks; a broker without a group has its own task.", enum=["broker", "group"],
        ),
        **steps.selection(),
        **{name: steps.settings()[name] for name in ("topic_config", "topic_configs", "metadata_is_current")},
        "truncate": Param(
            False, type="boolean", title="Truncate",
            description="Truncate logs that were torn by a crash, where a broker would (--truncate).",
        ),
        "all": Param(
            False, type="boolean", title="All",
            description="Also rebuild valid files that differ from what a recovering broker writes (--all).",
        ),
        "ledger": steps.compaction()["ledger"],
    },
    dag_display_name="keytail: rebuild indexes",
    description="Rebuild missing and wrong index files on the hosts of all stopped brokers",
    doc_md="""Rebuilds `.index`, `.timeindex` and `.txnindex` files that are missing or do not match their logs, on all
cores of the host of each stopped broker, then verifies. A running broker holds the lock of its log dirs: its task fails
and is retried, and the other tasks continue.

| Task | What it does |
|---|---|
| `choose` | reads the inventory: one mapped task for each broker, or for the brokers of a group, one after the other |
| `rebuild` | `keytail rebuild-index --execute` |
| `verify` | `keytail verify` |
| `report_partial` | fails with partitions and reasons if something was refused or is damaged; otherwise skipped |
| `done` | last task: succeeds if no step failed |

Retries are safe: index files that match their logs are not changed, so a second run finds nothing to do. With
`truncate`, logs that were torn by a crash are truncated where a broker would truncate them at startup. No time is
passed to keytail: it uses the clock of its host.
""",
    tags=["keytail", "kafka", "index"],
)
def index_rebuild() -> None:
    @steps.task(execution_timeout=steps.SHORT)
    def choose() -> list[list[str]]:
        values = steps.given()
        groups: dict[str, list[str]] = {}
        for one in inventory.chosen(values["brokers"]):
            key = f"group {one.group}" if values["by"] == "group" and one.group else f"broker {one.name}"
            groups.setdefault(key, []).append(one.name)
        return list(groups.values())

    tasks: list[Any] = []

    @task_group
    def brokers(names: list[str]) -> None:
        @steps.task(execution_timeout=timedelta(hours=24), map_index_template=NAMED)
        def rebuild(names: list[str]) -> list[dict[str, Any]]:
            words = [*steps.flags(steps.given(), "rebuild-index"), "--execute"]
            return of_each(names, "rebuild-index", lambda one: commands.run(
                one.command("rebuild-index", *words), one.on_host
            ))

        @steps.task(map_index_template=NAMED)
        def verify(names: list[str]) -> list[dict[str, Any]]:
            words = steps.flags(steps.given(), "verify")
            return of_each(names, "verify", lambda one: commands.run(one.command("verify", *words), one.on_host))

        in_order = [rebuild(names=names), verify(names=names)]
        chain(*in_order)
        tasks.extend(in_order)

    brokers.expand(names=choose())
    steps.end_with(*tasks, partial=["brokers.rebuild", "brokers.verify"])


index_rebuild()
