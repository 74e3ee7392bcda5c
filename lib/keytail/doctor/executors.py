"""Checks that the hosts of executors have the same Python, packages and hash function as the driver's host, and the
same log dirs at the same paths."""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keytail.errors import KeytailError
from keytail.extras import installed
from keytail.log.fs import LOCAL
from keytail.run.engine import Engine

_TASK_S = 0.3  # duration of a task: long enough for Spark to schedule the other tasks on other executors
_TASKS_PER_SLOT = 2  # number of tasks per task slot, so that hosts that are slow to start also get a task


@dataclass(frozen=True)
class Seen:
    """The report of one host. `log_dirs` has, by path, a digest of the names of the directories in it, and their number
    as text; "" and the error if the log dir cannot be listed.
    """

    host: str
    python: str
    versions: tuple[str, ...]
    hash_name: str
    log_dirs: Mapping[str, tuple[str, str]]


def look(log_dirs: Sequence[str], attempt: str = "") -> Seen:
    """Return the report of a process on this host. `attempt` is not used."""
    from keytail.kernels import native  # noqa: PLC0415 (only where work is done)

    packages = ("keytail", "numba", "numpy", "pyarrow", "pyspark")
    found = installed(*packages)
    versions = tuple(f"{name} {found.get(name, 'not installed')}" for name in packages)
    return Seen(
        host=os.uname().nodename,
        python=platform.python_version(),
        versions=versions,
        hash_name=native.HASH_NAME,
        log_dirs={path: _digest(path) for path in log_dirs},
    )


def _digest(path: str) -> tuple[str, str]:
    try:
        listed = sorted(entry.name for entry in LOCAL.scan_names(path) if entry.is_dir)
    except OSError as problem:
        return "", problem.strerror or str(problem)
    return hashlib.blake2b(repr(listed).encode(), digest_size=8).hexdigest(), f"{len(listed)} directories"


def _look_slowly(log_dirs: Sequence[str], attempt: str) -> Seen:
    seen = look(log_dirs)
    time.sleep(_TASK_S)
    return seen


def ask_executors(engine: Engine, log_dirs: Sequence[str]) -> tuple[dict[str, Seen], list[KeytailError]]:
    """Return the result of `look` by host, and the distinct errors of tasks that failed.

    Runs a small job with _TASKS_PER_SLOT tasks per task slot. A host without a free slot during the job is not checked.
    """
    payloads = [tuple(log_dirs)] * (_TASKS_PER_SLOT * engine.parallel_tasks)
    seen: dict[str, Seen] = {}
    problems: dict[str, KeytailError] = {}
    for outcome in engine.run_bundle(payloads, _look_slowly, name="doctor: what executors see"):
        if outcome.problem is not None:
            problems[str(outcome.problem)] = outcome.problem
        else:
            assert outcome.value is not None
            seen[outcome.value.host] = outcome.value
    return seen, [problems[text] for text in sorted(problems)]


def differences(here: Seen, there: Seen) -> list[str]:
    """Return a description of each relevant difference between this host and another host."""
    found = []
    if here.python.split(".")[:2] != there.python.split(".")[:2]:
        found.append(f"that host has Python {there.python}, this host has {here.python}")
    pairs = zip(here.versions, there.versions, strict=True)
    found += [f"that host has {other}, this host has {own}" for own, other in pairs if own != other]
    if here.hash_name != there.hash_name:
        found.append(f"that host computes hashes by {there.hash_name}, this host by {here.hash_name}")
    for path, (digest, listing) in here.log_dirs.items():
        other, other_listing = there.log_dirs[path]
        if other != digest:
            shown = other_listing if other else f"no listing ({other_listing})"
            found.append(f"the names in {path} differ: on that host it has {shown}, on this host {listing}")
    return found
