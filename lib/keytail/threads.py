"""Starts threads of a run, which inherit the context variables of the code that starts them.

Four values of a run only affect what is displayed: the style of its output (console.py), its id (ledger/of_run.py), the
channel for the progress of tasks (run/watching.py) and the count of bytes that a task has read (log/meter.py). They are
context variables, so that the functions between the command and the code that uses them need no parameters for them.
Unlike global variables, they differ between two runs in one process, in different threads or one after the other.
Python's own threads start without the variables of the code that starts them.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def inheriting(function: Callable[P, R]) -> Callable[P, R]:
    """Return a function that calls `function` with the context variables of the caller. The returned function may be
    called once, by a new thread."""
    return partial(contextvars.copy_context().run, function)


class Threads(ThreadPoolExecutor):
    """A thread pool whose work has the context variables of the code that submits it."""

    def submit(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        work: Any = inheriting(function)
        return super().submit(work, *args, **kwargs)
