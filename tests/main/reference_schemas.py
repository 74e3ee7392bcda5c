"""Generates the JSON Schemas of rows, one file for each command, and of the object of `--output json-v1`.

`python -m tests.main.reference_schemas` writes lib/keytail/cli/schemas/ from the declarations from which ROWS.md is
generated.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from keytail.cli import envelope
from keytail.cli.command import Command
from keytail.cli.rows import NOT_IN_JSON
from keytail.errors import ErrorText
from keytail.ledger.command import PartitionRow
from keytail.ledger.history import INTERRUPTED
from keytail.ledger.of_run import LedgerFlags
from keytail.main.main import COMMANDS
from tests.main.reference_rows import meaning_of, unwrapped

FOLDER = Path(envelope.__file__).with_name("schemas")
ENVELOPE = "json-v1.json"
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TYPES = {
    str: "string", ErrorText: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null",
}  # fmt: skip


def files() -> dict[str, str]:
    """Return the contents of all schema files, by file name."""
    found = {f"{command.name}.json": schema_of_rows(command) for command in COMMANDS.values() if command.rows}
    found[ENVELOPE] = schema_of_envelope()
    return {name: f"{_laid_out({'$schema': _DIALECT, **schema})}\n" for name, schema in found.items()}


def schema_of_rows(command: Command) -> dict[str, Any]:
    """Return the schema of the array of `--output json`, which the object of `--output json-v1` has as `rows`."""
    rows = [_row(row, _statuses(command, row)) for row in command.rows.values()]
    items = rows[0] if len(rows) == 1 else {"anyOf": rows}
    return {"title": f"Rows of keytail {command.name}", "type": "array", "items": items}


def schema_of_envelope() -> dict[str, Any]:
    made = _object(envelope.Envelope)
    made["properties"]["command"]["enum"] = [name for name, command in COMMANDS.items() if command.rows]
    return {"title": "Output of keytail with --output json-v1; COMMAND.json is the schema of its rows", **made}


def _statuses(command: Command, row: type[Any]) -> Sequence[str]:
    """Return the statuses of a row. A row of a ledger has a status of any command that records its runs."""
    if row is not PartitionRow:
        return list(command.statuses)
    recording = (item for item in COMMANDS.values() if get_type_hints(item.request).get("ledger") is LedgerFlags)
    return [*dict.fromkeys(status for item in recording for status in item.statuses), INTERRUPTED]


def _row(row: type[Any], statuses: Sequence[str]) -> dict[str, Any]:
    made = _object(row, NOT_IN_JSON)
    if "status" in made["properties"]:
        made["properties"]["status"] = {"description": "result of the command", "enum": list(statuses)}
    return made


def _object(kind: type[Any], without: Sequence[str] = ()) -> dict[str, Any]:
    """Return the schema of an object of a dataclass: with all fields, and without others."""
    hints, properties = get_type_hints(kind, include_extras=True), {}
    for field in fields(kind):
        if field.name in without:
            continue
        of_field, meaning = unwrapped(hints[field.name])
        properties[field.name] = {"description": meaning or meaning_of(field.name), **_schema(of_field)}
        if field.name == "error" and without:  # only rows have slugs beside an error
            properties["slugs"] = {"description": meaning_of("slugs"), **_schema(tuple[str, ...])}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _schema(kind: Any) -> dict[str, Any]:
    """Return the schema of a value of this type as JSON has it."""
    origin, of = get_origin(kind), get_args(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        return _object(kind)
    if origin in (types.UnionType, typing.Union):
        found = [_schema(item) for item in of]
        return {"type": [item["type"] for item in found]} if all(len(item) == 1 for item in found) else {"anyOf": found}
    if origin is Literal:
        return {"enum": list(of)}
    if origin in (tuple, list):
        return {"type": "array", "items": _schema(of[0])}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object"} if of[1] is Any else {"type": "object", "additionalProperties": _schema(of[1])}
    return {"type": _TYPES[kind]}


def _laid_out(value: Any, indent: str = "") -> str:
    """Return JSON in which a value is on one line if it fits, and otherwise has a line for each of its parts."""
    line = json.dumps(value)
    if len(indent + line) <= 110 or not isinstance(value, dict | list):
        return line
    names = [f"{json.dumps(name)}: " for name in value] if isinstance(value, dict) else [""] * len(value)
    more = f"{indent}  "
    parts = (name + _laid_out(part, more) for name, part in zip(names, _parts(value), strict=True))
    return f"{line[0]}\n{more}" + f",\n{more}".join(parts) + f"\n{indent}{line[-1]}"


def _parts(value: dict[str, Any] | list[Any]) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.json"):
        path.unlink()
    for name, text in files().items():
        (FOLDER / name).write_text(text)
