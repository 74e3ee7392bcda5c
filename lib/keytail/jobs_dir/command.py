"""Declares and runs the command `jobs-dir`, which finds the jobs in an installed package or in the source tree."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import keytail
from keytail.acting_user import as_caller
from keytail.cli.command import Command
from keytail.errors import KeytailError


@dataclass(frozen=True)
class Request:
    """The parameters of `jobs-dir`, which has no flags of its own."""


JOBS_DIR = Command(
    name="jobs-dir",
    also_called=("jobs", "spark", "spark-submit"),
    help="Print the directory of the jobs for spark-submit. The directory conf beside it has settings for the jobs.",
    request=Request,
    run="keytail.jobs_dir.command:print_jobs_dir",
    examples=("keytail jobs-dir",),
    output=None,
)


@as_caller()
def jobs_dir() -> Path:
    """Return the directory of the jobs; `conf` is beside it. Raises KeytailError if no such directory exists."""
    package = Path(keytail.__file__).parent
    places = (package / "jobs", package.parents[1] / "jobs")  # in a wheel, in the source tree
    for place in places:
        if (place / "compact.py").is_file():
            return place
    raise KeytailError(
        "keytail was installed without its jobs for spark-submit",
        path=str(places[0]),
        remedy="Install the wheel, which has them, or run keytail from its source tree",
        slug="jobs-not-installed",
    )


def print_jobs_dir(request: Request) -> int:
    """Print the directory, and return the exit status."""
    print(jobs_dir())
    return 0
