"""All recorded JSON output fits the JSON Schemas of the package, and changed rows do not."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from keytail.cli.rows import fields_of
from keytail.downtime.command import DowntimeRow
from keytail.main.main import COMMANDS
from tests.command_line import Run

RECORDED = Path(__file__).with_name("recorded")
NAMES = [name for name, command in COMMANDS.items() if command.rows]
ENVELOPE = "json-v1"
KNOWN = ("--topics-have-no-overrides", "--topic-config", "orders:cleanup.policy=compact")


@functools.cache
def schema(name: str) -> Draft202012Validator:
    text = resources.files("keytail.cli").joinpath(f"schemas/{name}.json").read_text()
    return Draft202012Validator(json.loads(text))


def fits(command: str, output: Any) -> bool:
    """Return whether the output of either format has the form of the command's schema."""
    if isinstance(output, list):
        return schema(command).is_valid(output)
    return schema(ENVELOPE).is_valid(output) and output["command"] == command and fits(command, output["rows"])


def recorded(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the command and the JSON of each recorded output that has rows or an error."""
    for section in re.split(r"^\$ keytail ", path.read_text(), flags=re.MULTILINE)[1:]:
        command = re.match(r"[\w-]+", section)
        if command is not None and command[0] in NAMES:
            for text in re.findall(r"^(?:\[\]|\[\n.*?^\]|\{\n.*?^\})$", section, re.MULTILINE | re.DOTALL):
                yield command[0], json.loads(re.sub(r": (?:TIME|SIZE)\b", ": 0", text))  # placeholders of numbers


@functools.cache
def rows_by_command() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES}
    for path in sorted(RECORDED.glob("*.txt")):
        for command, output in recorded(path):
            found[command] += output if isinstance(output, list) else output["rows"]
    found["downtime"] += json.loads(json.dumps([fields_of(DowntimeRow("r", "b1", "recorded", down_at_ms=1))]))
    return found


@pytest.mark.parametrize("name", [*NAMES, ENVELOPE])
def test_a_schema_is_valid_and_describes_each_field(name: str) -> None:
    Draft202012Validator.check_schema(schema(name).schema)

    def described(part: Any) -> None:
        for field, of_field in part.get("properties", {}).items():
            assert of_field["description"], field
        for inner in part.values() if isinstance(part, dict) else part:
            if isinstance(inner, dict | list):
                described(inner if isinstance(inner, dict) else dict(enumerate(inner)))

    described(schema(name).schema)


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.txt")), ids=lambda path: path.stem)
def test_recorded_output_fits_the_schema_of_its_command(path: Path) -> None:
    for command, output in recorded(path):
        schema(command).validate(output if isinstance(output, list) else output["rows"])
        assert fits(command, output)


@pytest.mark.parametrize("name", NAMES)
def test_a_changed_row_does_not_fit(name: str) -> None:
    rows = rows_by_command()[name]
    assert rows, f"no row of {name} is recorded"
    assert fits(name, rows)
    whole = {"version": 1, "keytail": "1.2.3", "command": name, "run_id": None, "exit_status": 0, "error": None}
    whole |= {"start_ms": 1, "end_ms": 2}
    assert fits(name, {**whole, "rows": rows})
    row = rows[0]
    wrong = [{**row, "more": 1}, {key: value for key, value in row.items() if key != next(iter(row))}]
    wrong += [{**row, field: [[]]} for field in row]
    wrong += [{**row, "status": "no-such-status"}] if "status" in row else []
    for changed in wrong:
        assert not fits(name, [changed]), changed
        assert not fits(name, {**whole, "rows": [changed]})


def test_a_changed_object_does_not_fit() -> None:
    [good] = [output for command, output in recorded(RECORDED / "compact.txt") if isinstance(output, dict)
              and output["error"]][:1]  # fmt: skip
    assert fits("compact", good)
    for changes in ({"version": 2}, {"more": 1}, {"command": "dump"}, {"exit_status": "0"}, {"rows": None}):
        assert not fits("compact", {**good, **changes}), changes
    for field in good:
        assert not schema(ENVELOPE).is_valid({key: value for key, value in good.items() if key != field}), field
    changed = copy.deepcopy(good)
    del changed["error"]["slug"]
    assert not fits("compact", changed)


@pytest.mark.parametrize("words", [("plan", *KNOWN), ("describe", *KNOWN), ("verify",), ("lookup", "--offset", "7")])
def test_both_formats_have_the_same_rows(run: Run, log_dir: Path, words: tuple[str, ...]) -> None:
    bare, whole = (run(*words, "--log-dirs", log_dir, "--output", output) for output in ("json", "json-v1"))
    [rows, made] = (json.loads(item.stdout) for item in (bare, whole))
    times = {"start_ms": 0, "end_ms": 0}
    assert [{**row, **times} for row in made["rows"]] == [{**row, **times} for row in rows] != []
    assert (made["exit_status"], made["error"], made["run_id"]) == (whole.exit_code, None, None)
    assert bare.exit_code == whole.exit_code
    assert fits(words[0], rows)
    assert fits(words[0], made)
