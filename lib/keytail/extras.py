"""Lists the extras of pyproject.toml with their packages, and defines the error for a package that is not installed.

Only the commands and flags that an extra `adds` need its packages. A command declares the extras that a request needs
(`Command.extras`), which are checked before the command does anything.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata

from keytail.acting_user import as_caller
from keytail.errors import UsageProblem

# Names of modules that differ from the name of their package, by package.
_MODULES = {"delta-spark": "delta"}


@dataclass(frozen=True)
class Extra:
    """An extra of pyproject.toml, with the packages that keytail imports; `doctor` reports an extra
    whose first package is missing as not installed. `adds`: the commands and flags that need the extra.
    """

    name: str
    packages: tuple[str, ...]
    adds: str

    @property
    def install(self) -> str:
        """The command that installs the extra."""
        return f"pip install 'keytail[{self.name}]'"

    @as_caller()
    def missing(self) -> list[str]:
        """Return the packages of the extra that are not installed. No package is imported."""
        return [name for name in self.packages if importlib.util.find_spec(_MODULES.get(name, name)) is None]


SPARK = Extra(
    "spark",
    ("pyspark", "pyarrow", "pandas"),
    "--master, spark-submit, SQL, import, fan-out, and audit of large partitions",
)
DELTA = Extra(
    "delta", ("delta-spark", "pyspark", "pyarrow", "pandas"), "export, import of Delta tables, and --ledger with Spark"
)
HISTORY = Extra("history", ("deltalake", "pyarrow"), "--ledger, history and report without starting Spark")
ARROW = Extra("arrow", ("pyarrow",), "reading of records in notebooks, by keytail.api")
OBJECT_STORE = Extra("object-store", ("pyarrow",), "--output-dir in an object store")
AVRO = Extra("avro", ("fastavro",), "export of Avro, and erase --key-format avro")
REPORT = Extra("report", ("jinja2",), "--report and report")
EXTRAS = (SPARK, DELTA, HISTORY, ARROW, OBJECT_STORE, AVRO, REPORT)

# Pairs of a command or flag and an extra that it needs.
Needs = Iterable[tuple[str, Extra]]


class MissingExtra(UsageProblem):
    """A command or a flag needs packages that are not installed."""

    default_slug = "missing-python-package"


def require(for_what: str, extra: Extra) -> None:
    """Raise MissingExtra if a package of the extra is not installed. `for_what` is the command or flag that needs it.
    """
    if missing := extra.missing():
        raise MissingExtra(
            f"{for_what} needs Python packages that are not installed: {', '.join(missing)}",
            remedy=f"With the pip of keytail's environment, run: {extra.install}; or, if keytail was installed from a "
            f"clone of its repository, run in that clone: pip install -c conf/constraints.txt '.[{extra.name}]'",
        )


@as_caller()
def installed(*packages: str) -> dict[str, str]:
    """Return the versions of the packages that are installed, by name."""
    versions = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
