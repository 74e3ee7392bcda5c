"""DAGs that compact logs of stopped brokers, and snapshots: plan, gate, compact, verify, read back the ledger."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import Param, TriggerRule, chain, task_group

sys.path.insert(0, str(Path(__file__).parent))  # only the root of a bundle is on the path

from keytail_provider import assets, steps
from keytail_provider.hooks.keytail import KeytailHook
from keytail_provider.operators.keytail import KeytailOperator
from keytail_provider.operators.keytail_submit import KeytailSubmitOperator, place

inventory = KeytailHook()
STEPS = """
| Task | What it does |
|---|---|
| `plan` | `keytail plan` and `keytail describe`: what is due, and how many bytes of it are dirty. Changes nothing |
| `gate` | skips the rest unless the dirty bytes reach `least_bytes` and `least_dirty_ratio`; its log has the figures |
| `compact` | `keytail compact --execute`, which is refused while a broker runs there: the task is then retried later |
| `verify` | `keytail verify` of the same partitions: every checksum, offset, index entry and file name |
| `ledger` | reads the record of the run back from the ledger; skipped without a `ledger` |
| `report_partial` | fails with partitions and reasons if a step was done only in part; is skipped if not |
| `done` | last task: succeeds if no step failed |

Retries are safe: keytail finishes or reverts what a killed run has begun, and a second run changes nothing. If some
partitions were refused or are damaged (status 3), the others are done, the task succeeds with `partial` in its XCom,
nothing is retried, and `report_partial` fails. No time is passed to keytail: each run uses the clock of its host.
"""

# The name of a mapped task in the UI. Mapped tasks are called with keywords, because templates refer to their names.
NAMED = "{{ task.op_kwargs['name'] }}"
NAMED_OPERATOR = "{{ task.broker }}"
_BROKERS = "keytail_compact_brokers"
_SNAPSHOTS = "keytail_compact_snapshots"


def _flags_of_compact(context: Any, jinja_env: Any) -> list[str]:
    return [*steps.flags({**context["params"], "ledger": None}, "compact"), "--execute"]


def _flags_of_verify(context: Any, jinja_env: Any) -> list[str]:
    return steps.flags(context["params"], "verify")


@steps.dag(
    _BROKERS,
    {
        "brokers": steps.brokers_param(),
        **steps.selection(),
        **steps.settings(),
        **steps.compaction(),
    },
    dag_display_name="keytail: compact brokers",
    description="Compact the log dirs of stopped brokers, each on its own host",
    doc_md=f"""Compacts the log dirs of stopped brokers, by a command on each broker's host. `choose` reads the
brokers from the inventory (the Connection `keytail_default`). Does not stop or start brokers.
{STEPS}""",
    tags=["keytail", "kafka", "compaction"],
)
def compact_brokers() -> None:
    @steps.task(execution_timeout=steps.SHORT)
    def choose() -> list[str]:
        """Return the names of this run's brokers. Raises InventoryError for a mistake in the inventory."""
        return [one.name for one in inventory.chosen(steps.given()["brokers"])]

    tasks: list[Any] = []

    @task_group
    def broker(name: str) -> None:
        @steps.task(execution_timeout=steps.SHORT, map_index_template=NAMED)
        def plan(name: str) -> dict[str, Any]:
            one = inventory.broker(name)
            return {"broker": name, "step": "plan", **steps.figures(one.command, steps.given(), one.host)}

        @steps.task(execution_timeout=steps.SHORT, map_index_template=NAMED)
        def gate(name: str, found: dict[str, Any]) -> dict[str, Any]:
            return steps.pass_gate(found, steps.given())

        compact = KeytailOperator(
            task_id="compact", command="compact", broker=name, arguments=_flags_of_compact,
            ledger="{{ params.ledger or '' }}", execution_timeout=timedelta(hours=24),
            map_index_template=NAMED_OPERATOR,
        )  # fmt: skip
        verify = KeytailOperator(
            task_id="verify", command="verify", broker=name, arguments=_flags_of_verify,
            map_index_template=NAMED_OPERATOR,
        )  # fmt: skip

        @steps.task(
            trigger_rule=TriggerRule.NONE_SKIPPED,  # it also runs after a failed run
            execution_timeout=steps.SHORT,
            map_index_template=NAMED,
        )
        def ledger(name: str) -> dict[str, Any]:
            one = inventory.broker(name)
            run_id = steps.left_by("broker.compact").get("run_id")
            made = steps.read_back(one.keytail, steps.given(), run_id, one.host)
            return {"broker": name, "step": "ledger", **made}

        planned = plan(name=name)
        in_order = [planned, gate(name=name, found=planned), compact, verify, ledger(name=name)]
        chain(*in_order)
        tasks.extend(in_order)

    broker.expand(name=choose())
    steps.end_with(*tasks, partial=["broker.compact", "broker.verify", "broker.ledger"])


@steps.dag(
    _SNAPSHOTS,
    {
        "log_dirs": steps.words_param((), "Log dirs", "One per line (--log-dirs). Default: log.dirs of config."),
        "config": steps.text_param(None, "server.properties", "Path of the broker's file (--config).", minLength=1),
        **steps.selection(),
        **steps.settings(),
        **steps.compaction(),
        "keytail_home": steps.text_param(
            steps.HOME, "keytail's home", "Environment in which keytail is installed on the worker and all "
            "executors, with jobs/ and conf/.", minLength=1,
        ),
        "spark_home": steps.text_param(None, "SPARK_HOME", "Default: the Spark of keytail's home.", minLength=1),
        "properties_file": steps.text_param(
            None, "Properties file", "For spark-submit (--properties-file) instead of conf/spark-defaults.conf; "
            "for a ledger: keytail's conf/spark-delta.conf.", minLength=1,
        ),
        "conf": Param({}, type="object", title="Spark's settings", description="Each is a --conf of spark-submit."),
    },
    dag_display_name="keytail: compact snapshots",
    description="Compact log dirs that are mounted on all hosts of a Spark cluster, by spark-submit",
    doc_md=f"""Compacts log dirs that a worker of Airflow and all hosts of a Spark cluster have at the same path, by
`spark-submit` in client mode with the connection `spark_default`. Nothing else may write to these log dirs.
{STEPS}""",
    tags=["keytail", "kafka", "compaction", "spark"],
)
def compact_snapshots() -> None:
    @steps.task(execution_timeout=steps.SHORT)
    def plan() -> dict[str, Any]:
        values = steps.given()

        def command(name: str, *more: str) -> tuple[str, ...]:
            return (f"{values['keytail_home']}/bin/keytail", name, *place(values), *more, "--output", "json")

        return {"step": "plan", **steps.figures(command, values)}

    @steps.task(execution_timeout=steps.SHORT)
    def gate(found: dict[str, Any]) -> dict[str, Any]:
        return steps.pass_gate(found, steps.given())

    @steps.task(trigger_rule=TriggerRule.NONE_SKIPPED, execution_timeout=steps.SHORT)  # it also runs after a failed run
    def ledger() -> dict[str, Any]:
        values = steps.given()
        run_id = steps.left_by("compact").get("run_id")
        return {"step": "ledger", **steps.read_back(f"{values['keytail_home']}/bin/keytail", values, run_id)}

    planned = plan()
    compact = KeytailSubmitOperator(
        task_id="compact", command="compact", job="compact.py", execute_it=True, execution_timeout=timedelta(hours=24),
        outlets=[assets.LEDGERS],
    )  # fmt: skip
    verify = KeytailSubmitOperator(task_id="verify", command="verify", job="verify.py")
    tasks: list[Any] = [planned, gate(planned), compact, verify, ledger()]
    chain(*tasks)
    steps.end_with(*tasks, partial=["compact", "verify", "ledger"])


compact_brokers()
compact_snapshots()
