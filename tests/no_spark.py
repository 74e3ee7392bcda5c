"""Runs a compaction as its command does, but calls in this process what Spark would call in a worker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

from keytail.compact import steps, worker
from tests.run.engines import LikeSpark


@contextlib.contextmanager
def without_spark() -> Iterator[None]:
    with (
        patch.object(steps, "workers_of_run", lambda *_, **__: LikeSpark()),
        patch.object(worker, "let_others_go_first"),  # this process continues with other tests
    ):
        yield
