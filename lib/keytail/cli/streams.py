"""The standard streams of a process: never a number that a file can get, and no end of a run where they take no more.

Where descriptor 1 is closed, the next file that is opened gets this number, and what is printed goes into that file.
So those that are closed are opened on /dev/null before anything else. What cannot be written is reported once, at the
end; what the run did, and its exit status, are the same.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, cast

from keytail.telling import Unfailing, say

_CLOSED = OSError(errno.EBADF, "it is closed")


def guard() -> None:
    """Once, when the process begins: open what is closed, and keep errors of output from ending the run."""
    closed = [fd for fd in (0, 1, 2) if not _is_open(fd)]
    for fd in closed:
        opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is this one
        os.set_inheritable(opened, True)
        assert opened == fd
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = cast(Any, Unfailing(sys.stdout or os.fdopen(1, "w", closefd=False), _CLOSED if 1 in closed else None))
    sys.stderr = cast(Any, Unfailing(sys.stderr or os.fdopen(2, "w", closefd=False)))


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def end_of_output(status: int, *, changes: bool) -> int:
    """The exit status of a run that ended with `status`, once its output is written, or is reported as lost.

    What was done (`changes`: files were changed, or were to be) has the same status whoever reads of it. A command that
    only looks has not done what it was asked for, unless its output was closed on purpose.
    """
    out = sys.stdout
    if not isinstance(out, Unfailing):  # not a process of the command line
        return status
    out.flush()
    problem = out.take_problem()
    if problem is None:
        return status
    why = problem.strerror or str(problem)
    meant = f"the exit status {status} is that of what was done"
    if problem is _CLOSED:
        say(f"keytail: standard output cannot be written: {why}; {meant}")
        return status
    if status or changes:
        say(f"keytail: standard output cannot be written: {why}. Output is missing; {meant}", "error")
        return status
    say(f"keytail: standard output cannot be written: {why}. Output is missing; run again", "error")
    return 1
