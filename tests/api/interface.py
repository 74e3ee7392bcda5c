"""Describes the public interface `keytail.api` as text: each exported name with its signature, and its members. The
fields of rows are on the page ROWS, which is generated.

`python -m tests.api.interface > tests/api/interface.txt` records it after an intended change, which is described in
CHANGES.md. Removing or changing a line needs a new major version (README.md, Versions).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from keytail import api
from keytail.run.rows import OfPartition

RECORDED = Path(__file__).with_name("interface.txt")


def interface() -> str:
    """Return a line for each name, method, property and field, sorted by name."""
    return "".join(f"{line}\n" for name in sorted(api.__all__) for line in _lines(name, getattr(api, name)))


def _lines(name: str, item: Any) -> Iterator[str]:
    if not inspect.isclass(item):
        yield f"{name}{inspect.signature(item)}" if inspect.isfunction(item) else f"{name} = {item}"
        return
    bases = ", ".join(base.__name__ for base in item.__bases__ if base.__name__ in (*api.__all__, "Exception"))
    yield f"class {name}({bases})"
    if issubclass(item, OfPartition) and item is not api.Partition:
        return
    if dataclasses.is_dataclass(item):
        yield from (f"{name}.{field.name}: {field.type}" for field in dataclasses.fields(item) if field.name[0] != "_")
    elif item is api.KeytailError:
        yield f"{name}{inspect.signature(item)}"
    for member, value in sorted(vars(item).items()):
        if member[0] != "_" and inspect.isfunction(value):
            yield f"{name}.{member}{inspect.signature(value)}"


if __name__ == "__main__":
    print(interface(), end="")
