"""Declares the command `jobs-dir`."""

from __future__ import annotations

from dataclasses import dataclass

from keytail.cli.command import Command


@dataclass(frozen=True)
class Request:
    """`jobs-dir` has no flags of its own."""


JOBS_DIR = Command(
    name="jobs-dir",
    also_called=("jobs", "spark", "spark-submit"),
    help="Print the directory of the jobs for spark-submit. The directory conf beside it has settings for them.",
    request=Request,
    run="keytail.jobs_dir.directory:print_jobs_dir",
    examples=("keytail jobs-dir",),
    output=None,
)
