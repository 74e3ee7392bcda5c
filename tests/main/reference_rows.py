"""Generates the page of rows and exit statuses from the declarations of the commands.

`python -m tests.main.reference_rows` prints it; lib/keytail/cli/ROWS.md is its last output.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from keytail.cli.command import Command
from keytail.cli.envelope import Envelope
from keytail.cli.rows import NOT_IN_JSON
from keytail.errors import ErrorText
from keytail.main.main import COMMANDS
from tests.main.reference import cell

_TOP = """\
# Rows and exit statuses

This page describes the rows that commands return. With `--output json` standard output is an array of these rows and
nothing else; tables show a part of the fields. With `--output json-v1` the array is in [an object that also has the
run's id, exit status and error](#the-object-of---output-json-v1). `--rows-file FILE` always writes the array.

The reason for a status is in `error`; see also [troubleshoot](../guide/troubleshoot.md). `slugs` has the slugs of the
errors in `error`: programs should use these, since the wording of a message may change, and its slug does not;
[ERRORS](../main/ERRORS.md) lists them. A number that is unknown or was not counted is `null`. Sizes are in bytes; the
size of a log is the size of its `.log` files. Times are in ms since 1970. Offsets named `end` are exclusive.
`make reference` generates this page from the program, and a test compares the two.
"""
_ENVELOPE = """\
## The object of `--output json-v1`

Standard output is one object, even if the command ends before it has rows: after an error, wrong usage or a signal.
This includes errors of the command line's syntax (an unknown flag, a missing value, a value that is not a number) if
the last `--output` among the arguments is `json-v1`. Only an unknown command, or a wrong flag before the command,
prints nothing there, as with `--output json`; its exit status is 2. A signal in the first second of a run, before its
handlers are installed, also prints nothing: it ends the process. `dump`, whose `--output json` is a stream of lines,
has no such object.
"""
_SCHEMAS = """\
A program first checks `version`, then `exit_status`. New fields do not change the version. If `error` is `null`, the
command was not ended by an error or a signal: the reason for an exit status other than 0 is in the rows, or on
standard error if a file of the run, such as its report, could not be written. If standard output cannot be written to
its end, the exit status of the process can differ ([below](#exit-statuses)), and the object is incomplete.

## JSON Schemas

The package has JSON Schemas (2020-12): `keytail/cli/schemas/COMMAND.json` describes the array of rows of a command, and
`keytail/cli/schemas/json-v1.json` the object, whose `rows` match the schema of its `command`. They have the type and
the meaning of each field and the statuses, and allow no other fields. Validate with the schemas of the installed
version, since a later version can have more fields.

<!-- not run: tests/main/test_schemas.py validates the output of each command in this way -->
```python
import importlib.resources, json, subprocess
import jsonschema

def schema(name):
    return json.loads(importlib.resources.files("keytail.cli").joinpath(f"schemas/{name}.json").read_text())

command = ["keytail", "plan", "--config", "/etc/kafka/server.properties", "--output", "json-v1"]
result = json.loads(subprocess.run(command, stdout=subprocess.PIPE).stdout)
jsonschema.validate(result, schema("json-v1"))
jsonschema.validate(result["rows"], schema(result["command"]))
```
"""
_END = """\
## Exit statuses

| Exit status | Meaning |
|---|---|
| 0 | every partition is done: compacted, clean or skipped, sound, alike, ... |
| 1 | no partition is done, or the run could not begin (a broker holds the lock); or a check found something |
| 2 | wrong usage: an unknown flag or topic, a directory that is not a log dir |
| 3 | some partitions are done, others refused, corrupt or failed; or all are done, but the ledger lacks the result |
| 130 | interrupted from the keyboard (SIGINT); the rows that were known are printed |
| 143 | stopped by SIGTERM; the rows that were known are printed |
| 141 | only if the command changes nothing: the process that read its output (`head`) has ended |

Output that cannot be written (a full disk, a closed pipe) does not change what was done: a run with `--execute` has the
exit status of the table above, and standard error reports once that output is missing. A command that only reads ends
with 1 instead of 0 (with 141 if the pipe was closed), since the requested output is missing. A closed standard output
(`>&-`) is treated like `/dev/null`: the exit status is that of the run, as it is if standard error cannot be written.
Closed descriptors 0 to 2 are opened on `/dev/null` first, so that no output is written into a file.

An interrupted `compact` or `export` prints a row for each partition, including those that were not begun; other
commands print rows for the completed partitions.

A partition that is named by `--partitions` and is skipped, or was not begun, counts as refused.

## The quarantine report

With `--quarantine-report FILE`, `compact`, `verify` and `rebuild-index` write a JSON array of all partitions that were
refused, corrupt, damaged or failed, with one object each: `topic`, `partition`, `log_dir`, `status`, `error`;
`problems`, each with `file`, `byte_position`, `byte_end` (exclusive, if known), `offset`, `offset_end`,
`what`, `remedy`; and `helps`, the remedies that apply (`re-fetch`, `truncate`, `salvage`) with their texts
([undo-and-salvage](../guide/undo-and-salvage.md#a-partition-is-damaged)). The file is written whole or not at all, with
an empty array if there is no such partition. A path in a log dir is wrong usage, and so is anything but a regular file
or a new name: a device, a pipe, a directory, a symbolic link. `--rows-file` and `--report` have the same rule, which is
checked before the work begins and again before the file gets its name.
"""
# The meaning of fields whose declarations have none: of many rows, or obvious.
_COMMON = {
    "topic": "name of the topic",
    "partition": "number of the partition",
    "log_dir": "path of the log dir",
    "status": "listed below",
    "error": "the reason for the status, or empty",
    "slugs": "the slugs of the errors in `error`",
    "start_ms": "when the work began",
    "end_ms": "when the work ended",
    "notes": "other findings and actions, a sentence each",
    "segments": "number of segments",
    "batches": "number of batches",
    "records": "number of records",
    "segments_before": "number of segments before the command",
    "segments_after": "number of segments after the command",
    "bytes_before": "size of the `.log` files before the command",
    "bytes_after": "size of the `.log` files after the command",
    "records_before": "number of records before the command",
    "records_after": "number of records after the command",
    "batches_after": "number of batches after the command",
    "tombstones_removed": "number of tombstones that were removed",
    "markers_removed": "number of transaction markers that were removed",
    "log_start_offset": "log start offset",
    "log_start_after": "log start offset after the command",
    "log_end_offset": "log end offset",
    "high_watermark": "high watermark",
    "cleaner_checkpoint": "the partition's offset in the checkpoint of the log cleaner",
    "cleaner_checkpoint_before": "`cleaner_checkpoint` before the command",
    "cleaner_checkpoint_after": "`cleaner_checkpoint` after the command",
    "base_offset": "base offset of the segment",
    "log_bytes": "size of the segment's `.log` file",
    "what": "what is wrong",
    "why": "the reason in words",
    "remedy": "what to do next",
    "path": "path of the file",
    "byte_position": "byte position in the file",
    "offset": "offset of the record",
    "timestamp_ms": "timestamp of the record",
    "leader_epoch": "leader epoch of the record's batch",
    "batch_base_offset": "base offset of the record's batch",
    "batch_last_offset": "last offset of the record's batch",
    "batch_bytes": "size of the record's batch",
    "codec": "codec of the record's batch",
    "run_id": "id of the run",
    "command": "command of the run",
    "host": "host of the run",
    "broker": "name of the broker",
    "down_at_ms": "when the stop of the broker began",
    "reachable_at_ms": "when the broker answered again; `null` if unknown",
    "in_sync_at_ms": "when all replicas were in sync again; `null` if unknown",
}
_TYPES = {str: "string", ErrorText: "string", int: "number", float: "number", bool: "boolean"}


def page() -> str:
    """Return the whole page, as Markdown."""
    of_rows: dict[tuple[type[Any], ...], list[Command]] = {}
    for command in COMMANDS.values():
        if command.rows:
            of_rows.setdefault(tuple(command.rows.values()), []).append(command)
    sections = [text for commands in of_rows.values() for text in _section(commands)]
    of_envelope = "\n".join(["| Field | Type | Meaning |", "|---|---|---|", *_fields(Envelope, ""), ""])
    return "\n".join([_TOP, *sections, _ENVELOPE, of_envelope, _SCHEMAS, _END])


def _section(commands: Sequence[Command]) -> Iterator[str]:
    """Yield the parts of the section of commands that have the same rows; the last command has all statuses."""
    command = commands[-1]
    yield f"## {' and '.join(f'`{item.name}`' for item in commands)}\n"
    for about, row in command.rows.items():
        yield f"{about or 'A row for each partition'}:\n"
        yield "\n".join(["| Field | Type | Meaning |", "|---|---|---|", *_fields(row, ""), ""])
    if command.statuses:
        lines = [f"| `{name}` | {cell(status.meaning)} |" for name, status in command.statuses.items()]
        yield "\n".join(["| Status | Meaning |", "|---|---|", *lines, ""])
    for status, meaning in command.exits.items():
        yield f"Exit status {status}: {meaning}.\n"


def _fields(row: type[Any], prefix: str) -> Iterator[str]:
    hints = get_type_hints(row, include_extras=True)
    for field in fields(row):
        if field.name in NOT_IN_JSON:
            continue
        kind, meaning = unwrapped(hints[field.name])
        text = meaning or meaning_of(field.name)
        yield f"| `{prefix}{field.name}` | {_type_text(kind)} | {cell(text)} |"
        if field.name == "error" and not prefix and row is not Envelope:
            yield f"| `slugs` | list | {meaning_of('slugs')} |"
        if (of_item := _item(kind)) is not None:
            yield from _fields(of_item, f"{prefix}{field.name}[].")
        if (of_object := _object(kind)) is not None:
            yield from _fields(of_object, f"{prefix}{field.name}.")


def unwrapped(hint: Any) -> tuple[Any, str]:
    """Return the type of a field, and the text with which it is annotated."""
    if get_origin(hint) is Annotated:
        kind, *marks = get_args(hint)
        return kind, next((mark for mark in marks if isinstance(mark, str)), "")
    return hint, ""


def meaning_of(name: str) -> str:
    """Return the meaning of a field whose declaration has none."""
    return _COMMON.get(name, "")


def _item(kind: Any) -> type[Any] | None:
    """Return the dataclass of the items of a tuple, if they are dataclass objects."""
    first = next(iter(get_args(kind)), None)
    return first if get_origin(kind) is tuple and is_dataclass(first) and isinstance(first, type) else None


def _object(kind: Any) -> type[Any] | None:
    """Return the dataclass of a field that contains an object of a dataclass or is null."""
    found = [item for item in get_args(kind) if is_dataclass(item) and isinstance(item, type)]
    return found[0] if get_origin(kind) in (types.UnionType, typing.Union) and found else None


def _type_text(kind: Any) -> str:
    if is_dataclass(kind):
        return "object"
    origin = get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        texts = [_type_text(item) for item in get_args(kind) if item is not type(None)]
        return f"{' or '.join(dict.fromkeys(texts))} or `null`"
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if origin in (tuple, list):
        return "list"
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return "object"
    return _TYPES.get(kind, "any")


if __name__ == "__main__":
    print(page(), end="")
