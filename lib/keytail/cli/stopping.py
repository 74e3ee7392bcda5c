"""SIGINT and SIGTERM end a run in order: what is being replaced is finished, locks are let go, scratch is removed.

A signal raises `Stopped` in the main thread, where every `finally` on its way does its part; one more soon after only
says that it is on its way. Whoever cannot wait sends SIGKILL: that is safe too, and the next run tidies up.
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
_PARENT_LOOKED_FOR_S = 0.25
# Longer than stopping takes: then it was raised where Python swallows it, as in a destructor.
_PATIENCE_S = 30.0
# Whether a signal would be raised as Stopped.
_is_stoppable = threading.Event()


class Stopped(KeyboardInterrupt):
    """The run was told to stop by signal `number`. `rows` are what it has to say for itself, where it got so far."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.rows: Sequence[Any] | None = None

    @property
    def exit_status(self) -> int:
        """As a shell says it of a program that died of the signal."""
        return 128 + self.number


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Within it the signals raise Stopped, but for those that the caller of this program has turned off (`nohup`)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    patient_until_s = 0.0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal patient_until_s
        if time.monotonic() < patient_until_s:
            with contextlib.suppress(OSError):  # nobody may read it any more
                os.write(2, b"keytail: stopping already; a moment\n")
            return
        patient_until_s = time.monotonic() + _PATIENCE_S
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


def die_quietly() -> None:
    """Have Ctrl-C end this program without a traceback where nothing is begun yet, or all is told."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def stop_with_parent(parent: int) -> None:
    """Have SIGTERM sent to this process once `parent`, which started it, has ended, as spark-submit's JVM may.

    What runs is told of it, before it has said its last word. A parent that has ended already counts too.
    """
    main = threading.main_thread().ident
    assert main is not None

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_LOOKED_FOR_S)
        _is_stoppable.wait()
        signal.pthread_kill(main, signal.SIGTERM)  # which wakes it, whatever it waits for

    threading.Thread(target=look, name="parent", daemon=True).start()
