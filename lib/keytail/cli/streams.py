"""Protects the standard streams of a process: no file gets their descriptors, and failed output does not end a run.

If descriptor 1 is closed, the next file that is opened gets this number, and output is printed into that file.
Therefore, closed standard descriptors are opened on /dev/null before anything else. Failed output is reported once, at
the end. Failed output does not affect the run, and changes the exit status only of a run that changes no log dir
(`end_of_output`).
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, cast

from keytail.console import Unfailing, print_message

_CLOSED = OSError(errno.EBADF, "it is closed")


def guard() -> None:
    """Open closed standard descriptors, and keep output errors from ending the run. This function is called once, at
    process start."""
    closed = [fd for fd in (0, 1, 2) if not _is_open(fd)]
    for fd in closed:
        opened = os.open(os.devnull, os.O_RDWR)  # the file gets the lowest free number, which is `fd`
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


READER_GONE = 141  # the exit status that a shell reports for a program whose reader (`head`) has ended


def end_of_output(status: int, *, changes: bool) -> int:
    """Write the remaining output, or report that it is lost. Return the exit status of a run that ended with `status`.

    If the run changes log dirs (`changes`), the status does not depend on the output. A command that only reads has
    failed if its output is lost, unless its output was closed on purpose. If its reader has ended (`head`), the status
    is READER_GONE instead of 0, and nothing is reported: the reader has read enough.
    """
    out = sys.stdout
    if not isinstance(out, Unfailing):  # this process does not run a command line
        return status
    out.flush()
    problem = out.take_problem()
    if problem is None:
        return status
    why = problem.strerror or str(problem)
    meant = f"the exit status {status} is the result of the command itself"
    if problem is _CLOSED:
        print_message(f"keytail: standard output cannot be written: {why}; {meant}")
        return status
    if isinstance(problem, BrokenPipeError) and not changes:
        return status or READER_GONE
    if status or changes:
        print_message(f"keytail: standard output cannot be written: {why}. Output is missing; {meant}", "error")
        return status
    print_message(f"keytail: standard output cannot be written: {why}. Output is missing; run again", "error")
    return 1
