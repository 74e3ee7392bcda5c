"""Runs a command of keytail on the host of a broker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException

from keytail_provider.assets import LEDGERS, add_event
from keytail_provider.brokers import InventoryError
from keytail_provider.commands import outcome
from keytail_provider.hooks.keytail import KeytailHook
from keytail_provider.steps import run_with_id


class KeytailOperator(BaseOperator):
    """Runs `keytail COMMAND` on the log dirs of a broker of a Connection, on that broker's host.

    `arguments` are further words, or a function of the context and Jinja's environment that returns them. `ledger` is
    passed as --ledger, and the task adds an event of the ledger's asset. The XCom has the broker, the command (`step`),
    the id of the run in the ledger, and the counts and rows of `commands.outcome`, which also decides whether the task
    fails or is retried.
    """

    template_fields: Sequence[str] = ("broker", "arguments", "ledger")

    def __init__(
        self,
        *,
        command: str,
        broker: Any,
        arguments: Any = (),
        ledger: Any = None,
        keytail_conn_id: str = KeytailHook.default_conn_name,
        **kwargs: Any,
    ) -> None:
        if ledger is not None:
            kwargs.setdefault("outlets", [LEDGERS])
        super().__init__(**kwargs)
        self.command = command
        self.broker = broker
        self.arguments = arguments
        self.ledger = ledger
        self.keytail_conn_id = keytail_conn_id

    def execute(self, context: Any) -> dict[str, Any]:
        ledger = ("--ledger", self.ledger) if self.ledger else ()
        try:
            one = KeytailHook(self.keytail_conn_id).broker(self.broker)
            ended, run_id = run_with_id(one.command(self.command, *ledger, *self.arguments), one.host)
        except InventoryError as mistake:
            raise AirflowFailException(str(mistake)) from mistake
        made = {"broker": one.name, "step": self.command, "run_id": run_id, **outcome(ended)}
        add_event(self.ledger, one.name, self.command, run_id)
        return made
