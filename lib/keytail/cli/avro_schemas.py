"""Reads Avro schemas that flags name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keytail.acting_user import as_caller
from keytail.errors import UsageProblem


def schema_id(text: str) -> int | None:
    """Return the id of a schema in a registry; None if the text is not a valid id."""
    return int(text) if text.isdecimal() and len(text) < 20 and int(text) < 2**31 else None


@as_caller()
def read_schema(flag: str, path: str) -> str:
    """Return the text of the schema that a flag names. Raises UsageProblem if the file cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise UsageProblem(
            f"{flag}: the schema cannot be read: {problem}", path=path, slug="unreadable-avro-schema"
        ) from problem


def parse_schema(parse: Callable[[Any], Any], text: str) -> Any:
    """Return what `parse` returns for the schema's JSON. Raises UsageProblem if the JSON or the schema is invalid."""
    try:
        return parse(json.loads(text))
    except Exception as reason:  # an error of json or fastavro, or caused by unexpected JSON
        raise UsageProblem(
            f"invalid Avro schema: {type(reason).__name__}: {reason}", slug="invalid-avro-schema"
        ) from reason
