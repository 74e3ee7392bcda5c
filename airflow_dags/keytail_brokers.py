"""Reads the inventory of brokers: how to run commands on their hosts, and keytail's flags for each.

The inventory is a TOML file, named by the environment variable KEYTAIL_BROKERS, otherwise keytail_brokers.toml beside
the DAGs; keytail_brokers.sample.toml explains each key. It is read by tasks, never while the DAGs are parsed, so a
mistake in it fails the task that needs it, without retries, with the error in that task's log.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "KEYTAIL_BROKERS"
BESIDE = Path(__file__).with_name("keytail_brokers.toml")


class InventoryError(ValueError):
    """A mistake in the inventory; the text names the file and what to write."""


@dataclass(frozen=True)
class Broker:
    """One broker.

    `on_host` is the prefix of a command that runs on the broker's host, such as ("ssh", "kafka@b1") or ("docker",
    "exec", "-i", "b1", "sh", "-c"); empty means this host. The command is appended as one word, a line for a shell, and
    gets standard input. `flags` are given to every keytail command on the broker's log dirs. `commands` are other
    commands by purpose, for DAGs that stop and start brokers.
    """

    name: str
    on_host: tuple[str, ...] = ()
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


def brokers(path: str | None = None) -> list[Broker]:
    """Return all brokers, in the order of the file. Raises InventoryError if the file is missing or has an error."""
    where = path or os.environ.get(VARIABLE) or str(BESIDE)
    try:
        with open(where, "rb") as file:
            found = tomllib.load(file)
    except FileNotFoundError:
        raise InventoryError(
            f"there is no inventory of brokers at {where}. Set {VARIABLE} to its path; for an example see "
            "keytail_brokers.sample.toml"
        ) from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise InventoryError(f"{where} cannot be read as TOML: {problem}") from problem
    if unknown := sorted(found.keys() - {"broker"}):
        raise InventoryError(f"{where}: unknown key {unknown[0]!r}; only [[broker]] tables are allowed")
    tables = found.get("broker", [])
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise InventoryError(f"{where} has no broker; add a [[broker]] table for each")
    made = [_broker(table, f"{where}: broker {number}") for number, table in enumerate(tables, 1)]
    for number, one in enumerate(made):
        if any(one.name == other.name for other in made[:number]):
            raise InventoryError(f"{where}: two brokers are named {one.name!r}; give each a different name")
    return made


def broker(name: str, path: str | None = None) -> Broker:
    """Return the broker with this name. Raises InventoryError if there is none."""
    known = brokers(path)
    for one in known:
        if one.name == name:
            return one
    raise InventoryError(f"the inventory has no broker {name!r}; it has {', '.join(one.name for one in known)}")


def chosen(names: Sequence[str]) -> list[Broker]:
    """Return the brokers with these names, or all brokers if no names are given."""
    return [broker(name) for name in names] or brokers()


_TEXTS = ("name", "keytail", "config", "group")
_LISTS = ("on_host", "log_dirs", "flags")


def _broker(table: Mapping[str, Any], where: str) -> Broker:
    name = table.get("name")
    if not isinstance(name, str) or not name.strip():
        raise InventoryError(f"{where} has no name; add one, such as name = \"b1\"")
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
        raise InventoryError(f"{where}: commands must be a table of lists of words, not {commands!r}")
    for log_dir in lists.get("log_dirs", ()):
        if "," in log_dir or not os.path.isabs(log_dir):
            raise InventoryError(f"{where}: log_dirs has {log_dir!r}; each must be an absolute path without a comma")
    if not table.get("config") and not lists.get("log_dirs"):
        raise InventoryError(f"{where} has neither config (its server.properties) nor log_dirs; give at least one")
    return Broker(
        **{key: table[key] for key in _TEXTS if key in table},
        **lists,
        commands={key: _words(words, f"{where}: commands.{key}") for key, words in commands.items()},
    )


def _words(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) and word for word in value):
        raise InventoryError(f"{where} must be a list of words, such as [\"ssh\", \"b1\"], not {value!r}")
    return tuple(value)
