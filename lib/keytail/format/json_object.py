"""Parses JSON objects that may be damaged or edited."""

from __future__ import annotations

import json
from typing import Any


def parse_object(data: bytes | str) -> dict[str, Any]:
    """Return the fields of a JSON object. Raises ValueError for any other data: text that is not JSON, JSON that is
    nested too deeply, or a value of another type."""
    try:
        found = json.loads(data)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("its JSON is not an object")
    return found
