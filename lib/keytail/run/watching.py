"""Reports the progress of running tasks to the driver: the partition that each task processes, and the number of bytes
that the task has read.

Spark reports a task only when the task has ended. Tasks therefore send a small datagram twice a second to a port that
the driver opens for the duration of the run. The port is on 127.0.0.1 or, with a Spark cluster, on the address at which
Spark's driver listens. If a firewall blocks the datagrams, the run only lacks the display of progress. Each datagram
begins with an authentication code that is computed with a secret key of the run, which the tasks get with their work.
Datagrams without a valid code are ignored.
"""

from __future__ import annotations

import contextlib
import contextvars
import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from keytail.log.meter import metered
from keytail.threads import inheriting

_EVERY_S = 0.5  # seconds between two reports of a task
# A task that takes at most this many seconds sends no last report: its answer arrives soon.
_SHORT_S = 0.2
_LONGEST_BYTES = 4096
_KEY_BYTES = _CODE_BYTES = 32  # bytes of HMAC-SHA-256
LOOPBACK = "127.0.0.1"


class DriverAddress(NamedTuple):
    """The addresses of the driver: tasks send to `host`, and the driver listens on `bind`, which may be different."""

    host: str
    bind: str


HERE = DriverAddress(LOOPBACK, LOOPBACK)


@dataclass(frozen=True)
class TaskProgress:
    """A report of one attempt of a task: the name of its partition, its phase, and the bytes that it has read so far.

    `is_over` is True in the last report. The task's answer may arrive later, with the answers of the job's other tasks.
    """

    name: str
    attempt: str
    phase: str
    read_bytes: int
    is_over: bool = False


@dataclass(frozen=True)
class Channel:
    """The driver's address and the key with which tasks send their progress. Tasks get the channel with their work."""

    host: str
    port: int
    key: bytes = field(repr=False)

    @contextlib.contextmanager
    def sending_progress(self, name: str, attempt: str, phase: str = "") -> Iterator[None]:
        """Send the progress of the work on partition `name` while the context is open. `phase` is reported until the
        work sets its own phase.
        """
        started_s, over = time.monotonic(), threading.Event()

        def send(is_over: bool = False) -> None:
            report = [name, attempt, meter.phase, meter.read_bytes, is_over]
            with contextlib.suppress(OSError):
                out.send(_with_code(json.dumps(report).encode(), self.key))

        def send_repeatedly() -> None:
            while not over.wait(_EVERY_S):
                send()

        with metered() as meter, contextlib.ExitStack() as held:
            meter.phase = phase
            try:
                family, address = _address(self.host, self.port)  # once: a look-up may take seconds
                out = held.enter_context(socket.socket(family, socket.SOCK_DGRAM))
                out.setblocking(False)
                out.connect(address)
            except OSError:  # the name cannot be resolved here, or there is no route to the host
                yield
                return
            thread = threading.Thread(target=send_repeatedly, name="progress", daemon=True)
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join()
                if time.monotonic() - started_s > _SHORT_S:
                    send(is_over=True)


class Watch:
    """Receives the reports of tasks in the driver; a context manager. A thread calls `on_progress` with each report.

    Raises OSError if no port can be opened.
    """

    def __init__(self, driver: DriverAddress, on_progress: Callable[[TaskProgress], None]) -> None:
        self._on_progress = on_progress
        family, address = _address(driver.bind, 0)
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        try:
            self._socket.bind(address)
        except OSError:
            self._socket.close()
            raise
        self.channel = Channel(driver.host, self._socket.getsockname()[1], secrets.token_bytes(_KEY_BYTES))
        self._over = threading.Event()
        self._thread = threading.Thread(target=inheriting(self._listen), name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        self._before = _channel.get()
        _channel.set(self.channel)
        return self

    def __exit__(self, *_: object) -> None:
        _channel.set(self._before)
        self._over.set()
        with contextlib.suppress(OSError), socket.socket(self._socket.family, socket.SOCK_DGRAM) as out:
            out.sendto(b"", self._socket.getsockname())  # wakes the thread
        self._thread.join(timeout=1.0)
        self._socket.close()

    def _listen(self) -> None:
        while not self._over.is_set():
            try:
                data = self._socket.recv(_LONGEST_BYTES)
            except OSError:
                return
            report = _parsed(data, self.channel.key)
            if report is not None:
                self._on_progress(report)


# The channel of this run is a context variable (threads.py), because many calls lie between the code that shows
# progress and the code that processes a partition.
_channel: contextvars.ContextVar[Channel | None] = contextvars.ContextVar("channel", default=None)


def current_channel() -> Channel | None:
    """Return the channel of this run's watch or, in a task, of the driver's watch; None if progress is not shown."""
    return _channel.get()


def send_to(channel: Channel | None) -> None:
    """Set the channel of the task that this thread will run. Must be called before the task begins."""
    _channel.set(channel)


def sending_progress(path: str, attempt: str, phase: str = "") -> contextlib.AbstractContextManager[None]:
    """Return a context that sends the progress of the work on the partition in directory `path` to the current channel.

    Without a channel, the context does nothing. `phase` is reported until the work sets its own phase.
    """
    channel = current_channel()
    return (
        contextlib.nullcontext()
        if channel is None
        else channel.sending_progress(os.path.basename(path), attempt, phase)
    )


def _address(host: str, port: int) -> tuple[int, Any]:
    """Return the address family of a host, and its address in the form for a socket of this family."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    return family, address


def _with_code(text: bytes, key: bytes) -> bytes:
    return hmac.digest(key, text, "sha256") + text


def _parsed(data: bytes, key: bytes) -> TaskProgress | None:
    """Return the report in a datagram, or None if the datagram is not from a task of this run. The authentication code
    is checked before the report is parsed."""
    text = data[_CODE_BYTES:]
    if not hmac.compare_digest(data, _with_code(text, key)):
        return None
    try:
        return TaskProgress(*json.loads(text))
    except (ValueError, TypeError):
        return None
