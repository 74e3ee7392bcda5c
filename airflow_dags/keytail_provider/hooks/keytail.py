"""Reads the brokers of a Connection of type `keytail`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowNotFoundException

from keytail_provider.brokers import Broker, InventoryError, brokers_of


class KeytailHook(BaseHook):
    """The brokers of one Connection, read again by each call. README.md describes the Connection.

    All methods raise InventoryError if the Connection has a mistake, and AirflowNotFoundException if the Connection is
    missing. A retry may help then: Airflow also reports a Connection as missing while its secrets backend or API server
    does not answer.
    """

    conn_name_attr = "keytail_conn_id"
    default_conn_name = "keytail_default"
    conn_type = "keytail"
    hook_name = "keytail"

    def __init__(self, keytail_conn_id: str = default_conn_name) -> None:
        super().__init__()
        self.keytail_conn_id = keytail_conn_id

    def get_conn(self) -> list[Broker]:
        """Return all brokers, in the order of the Connection."""
        where = f"the Connection {self.keytail_conn_id}"
        try:
            connection = self.get_connection(self.keytail_conn_id)
        except AirflowNotFoundException:
            raise AirflowNotFoundException(
                f"there is no Connection {self.keytail_conn_id}, or it cannot be read now: add one of type keytail, "
                "with the brokers in its extra"
            ) from None
        try:
            return brokers_of(json.loads(connection.extra or "{}"), where)
        except json.JSONDecodeError as problem:
            raise InventoryError(f"{where}: its extra is not valid JSON: {problem}") from problem

    def broker(self, name: str) -> Broker:
        """Return the broker with this name. Raises InventoryError if there is no such broker."""
        known = self.get_conn()
        for one in known:
            if one.name == name:
                return one
        names = ", ".join(one.name for one in known)
        raise InventoryError(f"the Connection {self.keytail_conn_id} has no broker {name!r}; it has {names}")

    def chosen(self, names: Sequence[str]) -> list[Broker]:
        """Return the brokers with these names, or all brokers if no names are given."""
        return [self.broker(name) for name in names] or self.get_conn()
