"""DAG that rebuilds missing or wrong index files of all brokers, with one task per broker or group of brokers."""

from __future__ import annotations

import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from airflow.sdk import Param, chain, task_group

sys.path.insert(0, str(Path(__file__).parent))  # only the root of a bundle is on the path

from keytail_provider import assets, commands, steps
from keytail_provider.hooks.keytail import KeytailHook

inventory = KeytailHook()
_DAG = "keytail_index_rebuild"
NAMED = "{{ ', '.join(task.op_kwargs['names']) }}"


def run_on(name: str, command: str, *words: str) -> commands.Ended:
    one = inventory.broker(name)
    return commands.run(one.command(command, *words), one.host)


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
| `report_partial` | fails with partitions and reasons if something was refused or is damaged; is skipped if not |
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
        @steps.task(execution_timeout=timedelta(hours=24), map_index_template=NAMED, outlets=[assets.LEDGERS])
        def rebuild(names: list[str]) -> list[dict[str, Any]]:
            values = steps.given()
            words = [*steps.flags(values, "rebuild-index"), "--execute"]
            outcomes = steps.of_each({name: partial(run_on, name, "rebuild-index", *words) for name in names},
                                     "rebuild-index")  # fmt: skip
            for name in names:
                assets.add_event(values["ledger"], name, "rebuild-index")
            return outcomes

        @steps.task(map_index_template=NAMED)
        def verify(names: list[str]) -> list[dict[str, Any]]:
            words = steps.flags(steps.given(), "verify")
            return steps.of_each({name: partial(run_on, name, "verify", *words) for name in names}, "verify")

        in_order = [rebuild(names=names), verify(names=names)]
        chain(*in_order)
        tasks.extend(in_order)

    brokers.expand(names=choose())
    steps.end_with(*tasks, partial=["brokers.rebuild", "brokers.verify"])


index_rebuild()
