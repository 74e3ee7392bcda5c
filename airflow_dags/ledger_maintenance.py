"""DAG that keeps the ledger of runs small: removes old rows and unreferenced files, merges small files."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from airflow.sdk import Param
from airflow.sdk.exceptions import AirflowFailException

sys.path.insert(0, str(Path(__file__).parent))  # only the root of a bundle is on the path

from keytail_provider import assets, commands, steps
from keytail_provider.brokers import HERE
from keytail_provider.hooks.keytail import KeytailHook

inventory = KeytailHook()
_DAG = "keytail_ledger_maintenance"


def maintain_one(values: Mapping[str, Any], ledger: str, name: str | None) -> commands.Ended:
    """Maintain the ledger on the host of the broker with this name, or of this worker."""
    broker = inventory.broker(name) if name else None
    keytail = broker.keytail if broker else f"{values['keytail_home']}/bin/keytail"
    words = [keytail, "history", *steps.flags({**values, "ledger": ledger}, "history"), "--maintain", "--execute"]
    if values["retain_days"] is not None:
        words += ["--retain-days", str(values["retain_days"])]
    return commands.run([*words, "--output", "json"], broker.host if broker else HERE)


@steps.dag(
    _DAG,
    {
        "ledger": steps.text_param(None, "Ledger", "Ledger of the runs (--ledger).", minLength=1),
        "retain_days": Param(
            400, type=["null", "integer"], minimum=1, title="Days to retain",
            description="Older rows are removed (--retain-days). Empty: none are removed.",
        ),
        "broker": steps.text_param(
            None, "Broker", "Broker on whose host the ledger is, by its name in the inventory. Empty: this worker."
        ),
        "keytail_home": steps.text_param(
            steps.HOME, "keytail's home", "Environment in which keytail is installed on this worker.",
            minLength=1,
        ),
        "delta_jars": steps.text_param(
            None, "Delta's jars",
            "Directory with Delta's JAR files, if no Maven repository can be reached (--delta-jars).",
            minLength=1,
        ),
    },
    dag_display_name="keytail: maintain the ledger",
    description="Remove old rows from the ledger of runs, and merge its small files",
    doc_md="""Keeps the ledger small with `keytail history --maintain`.

| Task | What it does |
|---|---|
| `maintain` | removes rows older than `retain_days`, merges small files, removes files unreferenced for a week |
| `report_partial` | fails if some tables were maintained and others were not; in every other case, is skipped |
| `done` | last task: succeeds if no step failed |

With the schedule `keytail_ledger`, a run starts after a task has written a ledger. It maintains each ledger that was
written since the previous run, once, on the host of the ledger's broker, or on this worker if the ledger has no broker.
A run that was started manually or by a cron schedule maintains the ledger of the Param `ledger`.

keytail commands may append to a ledger while it is maintained. Retries are safe: each table is changed by Delta's own
commits, and finished work is not repeated. The ledger is only a record: no command decides by it what to change in a
partition (`erase --ledger` reads it to find backups).
""",
    tags=["keytail", "ledger"],
)
def ledger_maintenance() -> None:
    @steps.task
    def maintain() -> list[dict[str, Any]]:
        values = steps.given()
        ledgers = assets.triggering() or assets.written([values])
        if not ledgers:
            raise AirflowFailException("the Params have no ledger: give the path of one")
        return steps.of_each({uri: partial(maintain_one, values, *of) for uri, of in ledgers.items()}, "maintain",
                             "ledger")  # fmt: skip

    steps.end_with(maintain(), partial=["maintain"])


ledger_maintenance()
