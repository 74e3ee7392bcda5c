"""Reads a JSON object that others may have damaged or edited."""

from __future__ import annotations

import json
from typing import Any


def parse_object(data: bytes | str) -> dict[str, Any]:
    """The fields of a JSON object. ValueError for all else: text that is no JSON, that is nested too deeply to be
    parsed, or a value of another kind."""
    try:
        found = json.loads(data)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"its JSON is {type(found).__name__}, not an object")
    return found
