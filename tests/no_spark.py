"""Runs a compaction as its command does, but calls functions that Spark would send to a worker in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from keytail.compact import compaction as scheduling
from keytail.compact import execution as compaction
from keytail.compact.out_of_place import driver as out_of_place
from keytail.run.tasks import Outcome, attempt_one


@contextlib.contextmanager
def without_spark() -> Iterator[None]:
    context = SimpleNamespace(defaultParallelism=2, master="local[2]")
    attempts = iter(range(10**9))

    def run_bundle(spark: Any, tasks: Sequence[Any], function: Any, **_: Any) -> list[Outcome[Any]]:
        return [attempt_one(function, task, f"n{next(attempts)}") for task in tasks]

    with (
        patch.object(compaction, "workers_of_run", lambda *_, **__: SimpleNamespace(sparkContext=context)),
        patch.object(out_of_place, "workers_of_run", lambda *_, **__: SimpleNamespace(sparkContext=context)),
        patch.object(scheduling, "run_bundle", run_bundle),
    ):
        yield
