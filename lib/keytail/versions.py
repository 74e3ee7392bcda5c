"""What keytail runs on: the one table of Pythons and Javas that are supported, for pyproject.toml, `doctor` and pages.

Supported is what the pinned Spark supports and keytail was tried with: `make versions` tries what a machine has.
tests/test_versions.py holds to this table what cannot import it.
"""

from __future__ import annotations

from collections.abc import Sequence

# CPython, oldest first. Older ones lack what keytail is written in; newer ones may do, once their wheels are there.
PYTHONS = ("3.11", "3.12", "3.13")

# Releases of Java that Spark 4.2 supports, each with the first version of it that may be used. Before 25.0.3 the
# collector that Java takes by default (G1) moves memory that native code holds, and compressed data comes out damaged
# (JDK-8377811).
JAVAS = {17: "17", 21: "21", 25: "25.0.3"}
OLDEST_JAVA = min(JAVAS)


def numbers(version: str) -> tuple[int, ...]:
    """`25.0.3` as (25, 0, 3), so that versions can be compared."""
    return tuple(map(int, version.split(".")))


def either(names: Sequence[object]) -> str:
    """`17, 21 or 25`."""
    *most, last = map(str, names)
    return f"{', '.join(most)} or {last}" if most else last
