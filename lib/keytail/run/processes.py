"""Child processes that run tasks in place of Spark's Python workers, where the work does not justify a session.

They are forked from the driver once it has loaded what tasks need, so they start in milliseconds. A child that dies,
for example because the kernel kills it when memory runs out, loses only its own task. No child outlives the driver,
however the driver ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import queue
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from keytail.run.tasks import Outcome, interrupted, killed, watched_attempt
from keytail.run.watching import HERE, current_channel
from keytail.threads import inheriting

P = TypeVar("P")
R = TypeVar("R")

_SET_PARENT_DEATH_SIGNAL = 1  # of prctl(2)
_FORK, _END = b"f", b"e"
_PID_BYTES = 8
_LONGEST_END_S = 10.0


class Processes:
    """The engine (run/engine.py) of `count` child processes; a context manager. Create it in the main thread, before
    other threads start.

    `function` may be given here, with everything it refers to, or to `run`, which has to pickle it.
    """

    session: Any = None
    has_workers = True
    driver_address = HERE

    def __init__(self, count: int, function: Callable[[Any, str], Any] | None = None) -> None:
        self.count = count
        self.is_cancelled = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._control, theirs = socket.socketpair()
        self._lock = threading.Lock()  # guards the control socket
        self._numbers = iter(range(2**63))
        driver = os.getpid()
        self._forker = os.fork()
        if self._forker == 0:
            _be_child(lambda: _fork_on_demand(theirs, function), keep=theirs.fileno(), parent=driver)
        theirs.close()
        self._threads = [
            threading.Thread(target=inheriting(self._serve), name=f"worker-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def concurrent_tasks(self) -> int:
        return self.count

    parallel_tasks = concurrent_tasks

    def run_bundle(
        self,
        payloads: Sequence[P],
        function: Callable[[P, str], R],
        *,
        name: str = "",
        stopped: Callable[[], bool] = lambda: False,
        before_again: Callable[[P], object] = lambda payload: None,
    ) -> list[Outcome[R]]:
        """Do the same as `Engine.run_bundle`."""
        answers = self.run(payloads, partial(watched_attempt, function, current_channel()), before_again)
        problem = interrupted() if stopped() else killed("twice")
        return [Outcome(None, problem) if answer is None else answer for answer in answers]

    def run(
        self,
        payloads: Sequence[P],
        function: Callable[[P, str], R] | None = None,
        before_again: Callable[[P], object] = lambda payload: None,
        on_end: Callable[[], object] = lambda: None,
    ) -> list[R | None]:
        """Call `function(payload, attempt)` for each payload, started in order; return the answers in order. Any thread
        may call it. `on_end` is called at the end of each, in another thread.

        A worker that dies is replaced, and its payload is tried once more, after `before_again(payload)` is called. The
        answer is None if the worker died again, or everything was cancelled. An exception of `function` ends its
        worker: it should raise none.
        """
        jobs = [_Job(function, payload, before_again) for payload in payloads]
        for job in jobs:
            job.answer.add_done_callback(lambda _: self.is_cancelled or on_end())
            self._jobs.put(job)
        return [job.answer.result() for job in jobs]

    def has_ended(self) -> bool:
        return False

    def cancel(self) -> None:
        """Kill the running tasks and start no others; their callers get None."""
        self.is_cancelled = True
        self._end_workers()

    def close(self) -> None:
        """End all processes, which also releases their share of the driver's locks, and wait for them."""
        self.is_cancelled = True
        for _ in self._threads:
            self._jobs.put(None)
        self._end_workers()
        self._control.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._forker, 0)
        for thread in self._threads:
            thread.join(_LONGEST_END_S)

    def _serve(self) -> None:
        """Run the jobs of one worker, in a thread of the driver."""
        worker: Connection | None = None
        while (job := self._jobs.get()) is not None:
            answer: Any = None
            for attempt in range(2):
                if self.is_cancelled:
                    break
                try:
                    if attempt:
                        job.before_again(job.payload)
                    worker = worker or self._new_worker()
                    worker.send_bytes(pickle.dumps((job.function, job.payload, f"h{next(self._numbers)}")))
                    answer = pickle.loads(worker.recv_bytes())
                    break
                except (EOFError, OSError):  # the worker has died
                    if worker is not None:
                        worker.close()
                    worker = None
                except BaseException as problem:
                    job.answer.set_exception(problem)
                    break
            if not job.answer.done():
                job.answer.set_result(answer)
        if worker is not None:
            worker.close()

    def _new_worker(self) -> Connection:
        ours, theirs = socket.socketpair()
        with self._lock:
            socket.send_fds(self._control, [_FORK], [theirs.fileno()])
            theirs.close()
            if len(self._control.recv(_PID_BYTES)) != _PID_BYTES:
                raise EOFError
        return Connection(ours.detach())

    def _end_workers(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._control.send(_END)
            self._control.recv(_PID_BYTES)


class _Job:
    def __init__(self, function: Any, payload: Any, before_again: Callable[[Any], object]) -> None:
        self.function, self.payload, self.before_again = function, payload, before_again
        self.answer: Future[Any] = Future()


def _be_child(main: Callable[[], None], keep: int, parent: int) -> None:
    """Run `main` after a fork by `parent`, with the descriptor `keep` and no other of the parent's, then exit.

    Descriptors are closed first: until then the child shares the driver's locks, even if the driver has been killed.
    """
    try:
        os.closerange(3, keep)
        os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
        _end_with_parent(parent)
        for number in (signal.SIGINT, signal.SIGTERM):  # they are sent to the whole group; the driver handles them
            signal.signal(number, signal.SIG_IGN)
        gc.freeze()  # the collector skips the driver's objects, so that their pages stay shared
        main()
    finally:
        os._exit(0)


def _end_with_parent(parent: int) -> None:
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _fork_on_demand(control: socket.socket, function: Any) -> None:
    """Fork workers on request. The child that runs this has no threads, so a fork cannot copy a lock that one of them
    holds."""
    workers: set[int] = set()
    forker = os.getpid()
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        for pid in [pid for pid in workers if os.waitpid(pid, os.WNOHANG)[0]]:
            workers.remove(pid)
        if request == _FORK:
            [descriptor] = descriptors
            pid = os.fork()
            if pid == 0:
                jobs = Connection(descriptor)
                _be_child(partial(_work, jobs, function), keep=descriptor, parent=forker)
            os.close(descriptor)
            workers.add(pid)
            control.send(pid.to_bytes(_PID_BYTES, "big"))
            continue
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        for pid in workers:
            os.waitpid(pid, 0)
        workers.clear()
        if not request:  # the driver has closed its end, or died
            return
        control.send(bytes(_PID_BYTES))


def _work(jobs: Connection, function: Any) -> None:
    while True:
        given, payload, attempt = pickle.loads(jobs.recv_bytes())
        jobs.send_bytes(pickle.dumps((given or function)(payload, attempt)))
