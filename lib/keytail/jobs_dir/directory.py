"""Finds the jobs for spark-submit, and the settings beside them: in an installed package, or in the source tree."""

from __future__ import annotations

from pathlib import Path

import keytail
from keytail.acting_user import as_caller
from keytail.errors import KeytailError
from keytail.jobs_dir.command import Request


@as_caller()
def jobs_dir() -> Path:
    """Return the directory of the jobs; `conf` is beside it. Raises KeytailError if there is none."""
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
