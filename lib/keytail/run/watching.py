"""How the driver hears from tasks that run: who is at what, and how much of it has been read.

Spark tells of a task when it has ended. So tasks send a small datagram twice a second, to a port that the driver has
for as long as the run lasts: on 127.0.0.1, or on a cluster where Spark itself has the driver listen. Nothing depends
on them. A firewall that holds them up costs the view of what is in flight, no more. Each begins with a code that only
a task with the run's key can make, and Spark takes the key to tasks: what has none is ignored, whoever has sent it.
"""

from __future__ import annotations

import contextlib
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

from keytail.log.meter import METER
from keytail.run.processes import Processes

_EVERY_S = 0.5
# A task that is over sooner is told of by its answer.
_SHORT_S = 0.2
_LONGEST_BYTES = 4096
_KEY_BYTES = _CODE_BYTES = 32  # of HMAC-SHA-256
LOOPBACK = "127.0.0.1"


class DriverAddress(NamedTuple):
    """`host` is what tasks call the driver's; it listens on `bind`, which may be another address of it."""

    host: str
    bind: str


HERE = DriverAddress(LOOPBACK, LOOPBACK)


@dataclass(frozen=True)
class Sign:
    """Of one attempt of a task: the partition it works at, its phase, and the bytes it has read so far.

    `is_over`: the last of it. Its answer may come later, with those of the other tasks of its job.
    """

    name: str
    attempt: str
    phase: str
    read_bytes: int
    is_over: bool = False


@dataclass(frozen=True)
class Channel:
    """Where tasks send signs; goes to them with what they are to do."""

    host: str
    port: int
    key: bytes = field(repr=False)

    @contextlib.contextmanager
    def telling(self, name: str, attempt: str, phase: str = "") -> Iterator[None]:
        """While it lasts, signs of what this process does for the partition `name`; `phase` until it has its own."""
        begun_bytes, begun_s, over = METER.read_bytes, time.monotonic(), threading.Event()

        def send(is_over: bool = False) -> None:
            sign = [name, attempt, METER.phase, METER.read_bytes - begun_bytes, is_over]
            with contextlib.suppress(OSError):
                out.send(_with_code(json.dumps(sign).encode(), self.key))

        def go_on() -> None:
            while not over.wait(_EVERY_S):
                send()

        with METER.during(phase), contextlib.ExitStack() as held:
            try:
                family, address = _address(self.host, self.port)  # once: a name may take seconds to look up
                out = held.enter_context(socket.socket(family, socket.SOCK_DGRAM))
                out.setblocking(False)
                out.connect(address)
            except OSError:  # the name of the driver's host means nothing here, or no way leads there
                yield
                return
            thread = threading.Thread(target=go_on, name="progress", daemon=True)
            thread.start()
            try:
                yield
            finally:
                over.set()
                thread.join()
                if time.monotonic() - begun_s > _SHORT_S:
                    send(is_over=True)


class Watch:
    """The driver's end. `heard` is called for each sign, from a thread of the watch. A context manager.

    OSError where there is no such port to be had.
    """

    def __init__(self, driver: DriverAddress, heard: Callable[[Sign], None]) -> None:
        self._heard = heard
        family, address = _address(driver.bind, 0)
        self._socket = socket.socket(family, socket.SOCK_DGRAM)
        try:
            self._socket.bind(address)
        except OSError:
            self._socket.close()
            raise
        self.channel = Channel(driver.host, self._socket.getsockname()[1], secrets.token_bytes(_KEY_BYTES))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        _current.append(self.channel)
        return self

    def __exit__(self, *_: object) -> None:
        _current[:] = [one for one in _current if one != self.channel]
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
            sign = _parsed(data, self.channel.key)
            if sign is not None:
                self._heard(sign)


# A process has one run, and what works at a partition is deep below what shows progress.
_current: list[Channel] = []


def current_channel() -> Channel | None:
    """Of the watch of this process or, in a task, of the driver's; None where nobody watches."""
    return _current[-1] if _current else None


def send_to(channel: Channel | None) -> None:
    """In the process of a task, before it begins."""
    _current[:] = [] if channel is None else [channel]


def telling(path: str, attempt: str, phase: str = "") -> contextlib.AbstractContextManager[None]:
    """While it lasts, whoever watches hears of what this process does at the partition in directory `path`.

    `phase`: until the work has phases of its own.
    """
    channel = current_channel()
    return METER.during(phase) if channel is None else channel.telling(os.path.basename(path), attempt, phase)


def address_of_driver(spark: Any) -> DriverAddress:
    """Where tasks of `spark`, a session or Processes in its place, reach the driver; None: this process does them."""
    if spark is None or isinstance(spark, Processes) or spark.sparkContext.master.startswith("local"):
        return HERE
    settings = spark.sparkContext.getConf()
    host = str(settings.get("spark.driver.host", LOOPBACK))
    return DriverAddress(host.strip("[]"), str(settings.get("spark.driver.bindAddress", host)).strip("[]"))


def _address(host: str, port: int) -> tuple[int, Any]:
    """Its family, and what a socket of that takes."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    return family, address


def _with_code(text: bytes, key: bytes) -> bytes:
    return hmac.digest(key, text, "sha256") + text


def _parsed(data: bytes, key: bytes) -> Sign | None:
    """None for what no task of this run has sent, of which nothing is looked at."""
    text = data[_CODE_BYTES:]
    if not hmac.compare_digest(data, _with_code(text, key)):
        return None
    try:
        return Sign(*json.loads(text))
    except (ValueError, TypeError):
        return None
