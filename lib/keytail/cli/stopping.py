"""Ends a run in an orderly way after SIGINT or SIGTERM: a replacement in progress is finished, locks are released, and
scratch files are removed.

A signal raises `Stopped` in the main thread, where context managers and `finally` clean up. A second signal soon after
the first only prints that the run is stopping. If stopping takes too long, SIGKILL is safe, too: the next run cleans
up.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PARENT_CHECK_S = 0.25
# Time in which a second signal does not stop the run again, longer than stopping takes. If the run continues after this
# time, Python has suppressed the exception, as in a destructor.
_LONGEST_CLEANUP_S = 30.0
# Whether a signal would now be raised as Stopped.
_is_stoppable = threading.Event()


class Stopped(KeyboardInterrupt):
    """The run was stopped by signal `number`. `rows` are the rows of the run; None if the run had no rows yet."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.rows: Sequence[Any] | None = None

    @property
    def exit_status(self) -> int:
        """The exit status that a shell reports for a program that died of the signal."""
        return 128 + self.number


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Make SIGINT and SIGTERM raise Stopped within the context, except a signal that the caller ignores (`nohup`). Does
    nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    cleanup_until_s = 0.0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal cleanup_until_s
        if time.monotonic() < cleanup_until_s:
            with contextlib.suppress(OSError):  # the reader of standard error may have ended
                os.write(2, b"keytail: already stopping, please wait\n")
            return
        cleanup_until_s = time.monotonic() + _LONGEST_CLEANUP_S
        raise Stopped(number)

    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        _is_stoppable.set()
        yield
    finally:
        _is_stoppable.clear()
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_without_trace() -> None:
    """Make Ctrl-C end this program without a traceback. Call this function before anything has begun, and after all
    output is printed.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def stop_with_parent(parent: int) -> None:
    """Send SIGTERM to this process when `parent`, which started it, has ended, as the JVM of spark-submit may.

    The signal is sent only while `stoppable` is active, so that the run can report it. The signal is also sent if the
    parent has already ended.
    """
    main = threading.main_thread().ident
    assert main is not None

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_S)
        _is_stoppable.wait()
        signal.pthread_kill(main, signal.SIGTERM)  # this wakes the main thread, whatever it waits for

    threading.Thread(target=look, name="parent", daemon=True).start()
