"""Lists the supported versions of Python and Java, for pyproject.toml, `doctor` and the documentation.

A version is supported if the pinned Spark supports it and keytail was tested with it: `make versions` runs the tests
with each version that is installed on a machine. tests/test_versions.py checks files that cannot import this table
against it.
"""

from __future__ import annotations

from collections.abc import Sequence

# Versions of CPython, ascending. Older versions lack features that keytail uses; newer versions may work once the
# dependencies have wheels for them.
PYTHONS = ("3.11", "3.12", "3.13")

# Releases of Java that Spark 4.2 supports, each with its first usable version. In Java 25 before 25.0.3, the default
# collector (G1) moves memory that native code holds, which damages compressed data (JDK-8377811).
JAVAS = {17: "17", 21: "21", 25: "25.0.3"}
OLDEST_JAVA = min(JAVAS)


def numbers(version: str) -> tuple[int, ...]:
    """Return `25.0.3` as (25, 0, 3), so that versions can be compared."""
    return tuple(map(int, version.split(".")))


def either(names: Sequence[object]) -> str:
    """Return the names as `17, 21 or 25`."""
    *most, last = map(str, names)
    return f"{', '.join(most)} or {last}" if most else last
