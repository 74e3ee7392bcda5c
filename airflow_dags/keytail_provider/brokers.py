"""Reads and checks the inventory: the brokers that are listed in the extra of a Connection, each with the way to run
commands on its host and with its keytail flags.

The inventory is read by tasks, and while the DAG of the rolling run is parsed. A mistake in the inventory fails
the task that reads it; only the task `start` of the rolling run is then retried. A mistake that is found while the DAG
is parsed is an import error.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class InventoryError(ValueError):
    """A mistake in the inventory; the text names the Connection and states the correction."""


@dataclass(frozen=True)
class Host:
    """Where commands run: on this host, or on the host of the Connection `ssh_conn_id`, of type `ssh`.

    `prefix` is the start of a command there, such as ("sudo", "-n", "-u", "kafka", "sh", "-c") or ("docker", "exec",
    "-i", "b1", "sh", "-c"). The command is appended as one argument, a line for a shell. The prefix must pass standard
    input on to the command, which ends when its standard input is closed.
    """

    prefix: tuple[str, ...] = ()
    ssh_conn_id: str | None = None

    def shown(self, words: Sequence[str]) -> str:
        """Return the text of a command on this host, for logs and alerts."""
        line = shlex.join([*self.prefix, shlex.join(words)] if self.prefix else words)
        return f"[{self.ssh_conn_id}] {line}" if self.ssh_conn_id else line


HERE = Host()


@dataclass(frozen=True)
class Broker:
    """One broker. `flags` are given to every keytail command on the broker's log dirs. `commands` has further
    commands, such as those that stop and start the broker; the key is the purpose.
    """

    name: str
    host: Host = HERE
    keytail: str = "keytail"
    config: str | None = None
    log_dirs: tuple[str, ...] = ()
    group: str = ""
    flags: tuple[str, ...] = ()
    commands: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def command(self, command: str, *more: str) -> tuple[str, ...]:
        """Return the words of `keytail COMMAND` for the broker's log dirs, with rows on standard output."""
        words = [self.keytail, command]
        if self.config is not None:
            words += ["--config", self.config]
        if self.log_dirs:
            words += ["--log-dirs", ",".join(self.log_dirs)]
        return (*words, *self.flags, *more, "--output", "json")


def brokers_of(extra: Any, where: str) -> list[Broker]:
    """Return all brokers of a Connection's extra, in its order. Raises InventoryError for a mistake; its text begins
    with `where`."""
    if not isinstance(extra, dict):
        raise InventoryError(f'{where}: its extra must be an object, such as {{"brokers": [...]}}')
    if unknown := sorted(extra.keys() - {"brokers"}):
        raise InventoryError(f"{where}: unknown key {unknown[0]!r} in its extra; only brokers is allowed")
    tables = extra.get("brokers", [])
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise InventoryError(f"{where} has no broker; its extra needs a list brokers, with an object for each broker")
    made = [_broker(table, f"{where}: broker {number}") for number, table in enumerate(tables, 1)]
    for number, one in enumerate(made):
        if any(one.name == other.name for other in made[:number]):
            raise InventoryError(f"{where}: two brokers are named {one.name!r}; give each a different name")
    return made


_TEXTS = ("name", "ssh_conn_id", "keytail", "config", "group")
_LISTS = ("on_host", "log_dirs", "flags")


def _broker(table: Mapping[str, Any], where: str) -> Broker:
    name = table.get("name")
    if not isinstance(name, str) or not name.strip():
        raise InventoryError(f"{where} has no name; add one, such as \"name\": \"b1\"")
    where = f"{where} ({name})"
    if unknown := sorted(table.keys() - {*_TEXTS, *_LISTS, "commands"}):
        known = ", ".join((*_TEXTS, *_LISTS, "commands"))
        raise InventoryError(f"{where}: unknown key {unknown[0]!r}; the keys are {known}")
    for key in _TEXTS:
        if key in table and not (isinstance(table[key], str) and table[key]):
            raise InventoryError(f"{where}: {key} must be a string that is not empty, not {table[key]!r}")
    lists = {key: _words(table[key], f"{where}: {key}") for key in _LISTS if key in table}
    commands = table.get("commands", {})
    if not isinstance(commands, dict):
        raise InventoryError(f"{where}: commands must be an object with lists of words, not {commands!r}")
    for log_dir in lists.get("log_dirs", ()):
        if "," in log_dir or not os.path.isabs(log_dir):
            raise InventoryError(f"{where}: log_dirs has {log_dir!r}; each must be an absolute path without a comma")
    if not table.get("config") and not lists.get("log_dirs"):
        raise InventoryError(f"{where} has neither config (its server.properties) nor log_dirs; give at least one")
    host = Host(lists.pop("on_host", ()), table.get("ssh_conn_id"))
    return Broker(
        host=host,
        **{key: table[key] for key in _TEXTS if key in table and key != "ssh_conn_id"},
        **lists,
        commands={key: _words(words, f"{where}: commands.{key}") for key, words in commands.items()},
    )


def _words(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) and word for word in value):
        raise InventoryError(f"{where} must be a list of words, such as [\"sh\", \"-c\"], not {value!r}")
    return tuple(value)
