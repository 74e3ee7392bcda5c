"""Child processes that run tasks in place of Spark's Python workers, for work that does not justify a session.

The processes are forked from the driver after the driver has loaded the modules that tasks need, so they start in
milliseconds. If a child dies, for example because the kernel kills it when memory runs out, only its own task is lost.
No child outlives the driver, even if the driver is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
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

from keytail.errors import KeytailError
from keytail.run.tasks import Outcome, as_problem, interrupted, killed, watched_attempt
from keytail.run.watching import HERE, current_channel
from keytail.threads import inheriting

P = TypeVar("P")
R = TypeVar("R")

_SET_PARENT_DEATH_SIGNAL = 1  # number of an operation of prctl(2), PR_SET_PDEATHSIG
_FORK, _END = b"f", b"e"
_PID_BYTES = 8
_LONGEST_END_S = 10.0


class Processes:
    """An engine (run/engine.py) that runs tasks in `count` child processes; a context manager.

    The object must be created in the main thread, before other threads start: children are killed when the thread that
    forked them ends. A `function` that is given here is inherited by the fork; a function that is given to `run` or
    `run_bundle` is pickled.
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
        """Run `function` for each payload, as described in `Engine.run_bundle`."""
        jobs = self._put(
            payloads, partial(watched_attempt, function, current_channel()), before_again, stopped=stopped
        )
        answers = [job.answer.result() for job in jobs]
        is_stopped = stopped() or self.is_cancelled
        return [
            Outcome(None, _problem(job, is_stopped)) if answer is None else answer
            for job, answer in zip(jobs, answers, strict=True)
        ]

    def run(
        self,
        payloads: Sequence[P],
        function: Callable[[P, str], R] | None = None,
        before_again: Callable[[P], object] = lambda payload: None,
        on_end: Callable[[int], object] = lambda number: None,
    ) -> list[R | None]:
        """Call `function(payload, attempt)` for each payload, in order, and return the answers in this order. Any
        thread may call this method. `on_end` is called with the index of each payload that has ended, in another
        thread.

        A worker that dies is replaced, and its payload is tried once more, after `before_again(payload)` is called. The
        answer is None if the worker of the second attempt dies too, or the tasks are cancelled. Raises OSError if no
        worker could be started. `function` must not raise exceptions, since an exception ends its worker.
        """
        jobs = self._put(payloads, function, before_again, on_end)
        answers = [job.answer.result() for job in jobs]
        if not self.is_cancelled:
            for job in jobs:
                if job.error is not None:
                    raise job.error
        return answers

    def _put(
        self,
        payloads: Sequence[P],
        function: Any,
        before_again: Callable[[P], object],
        on_end: Callable[[int], object] = lambda number: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> list[_Job]:
        jobs = [_Job(function, payload, before_again, stopped) for payload in payloads]

        def ended(number: int, _: object) -> None:
            if not self.is_cancelled:
                on_end(number)

        for number, job in enumerate(jobs):
            job.answer.add_done_callback(partial(ended, number))
            self._jobs.put(job)
        return jobs

    def has_ended(self) -> bool:
        return False

    def cancel(self) -> None:
        """Kill the running tasks, and start no other tasks. The answers of killed and waiting tasks are None."""
        self.is_cancelled = True
        self._end_workers()

    def close(self) -> None:
        """End all processes and wait for them, so that none still shares the driver's locks."""
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
        """Pass jobs to one worker at a time and store the answers, in a thread of the driver, until `close`."""
        worker: Connection | None = None
        while (job := self._jobs.get()) is not None:
            answer: Any = None
            for attempt in range(2):
                if self.is_cancelled or (attempt and job.stopped()):
                    break
                try:
                    if attempt:
                        job.before_again(job.payload)
                    worker = worker or self._new_worker()
                    worker.send_bytes(pickle.dumps((job.function, job.payload, f"h{next(self._numbers)}")))
                    answer = pickle.loads(worker.recv_bytes())
                    job.error = None
                    break
                except (EOFError, OSError) as error:
                    if worker is None:
                        job.error = error  # the driver could not start the worker
                    else:
                        job.error = None  # the worker has died
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
        """Start a worker, and return the connection to it. Raises OSError if the fork fails."""
        ours, theirs = socket.socketpair()
        with ours, theirs, self._lock:
            try:
                socket.send_fds(self._control, [_FORK], [theirs.fileno()])
                pid = self._control.recv(_PID_BYTES)
            except (BrokenPipeError, ConnectionResetError):
                pid = b""
            if len(pid) != _PID_BYTES:
                raise ChildProcessError(errno.ECHILD, "the process that starts worker processes has died")
            return Connection(ours.detach())

    def _end_workers(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._control.send(_END)
            self._control.recv(_PID_BYTES)


class _Job:
    def __init__(
        self, function: Any, payload: Any, before_again: Callable[[Any], object], stopped: Callable[[], bool]
    ) -> None:
        self.function, self.payload, self.before_again, self.stopped = function, payload, before_again, stopped
        self.answer: Future[Any] = Future()
        self.error: Exception | None = None  # why no worker ran the last attempt


def _problem(job: _Job, is_stopped: bool) -> KeytailError:
    """Return the error that describes why the job has no answer."""
    if is_stopped:
        return interrupted()
    return killed("twice") if job.error is None else as_problem(job.error)


def _be_child(main: Callable[[], None], keep: int, parent: int) -> None:
    """Run `main` in a process that `parent` has forked, then exit. Only `keep` of the descriptors above 2 stays open.

    All descriptors except `keep` are closed first, because with them the child would hold the driver's locks even after
    the driver has been killed.
    """
    try:
        os.closerange(3, keep)
        os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
        _end_with_parent(parent)
        # SIGINT and SIGTERM may be sent to the whole process group, but only the driver handles them.
        for number in (signal.SIGINT, signal.SIGTERM):
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
    """Fork a worker for each _FORK on `control`, and kill all workers at each _END, until the driver closes its socket
    or ends. The process that runs this function has no threads, so a fork cannot copy a lock that a thread holds."""
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
                connection = Connection(descriptor)
                _be_child(partial(_work, connection, function), keep=descriptor, parent=forker)
            os.close(descriptor)
            workers.add(pid)
            control.send(pid.to_bytes(_PID_BYTES, "big"))
            continue
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        for pid in workers:
            os.waitpid(pid, 0)
        workers.clear()
        if not request:  # the driver has closed its socket, or has died
            return
        control.send(bytes(_PID_BYTES))


def _work(connection: Connection, function: Any) -> None:
    while True:
        given, payload, attempt = pickle.loads(connection.recv_bytes())
        connection.send_bytes(pickle.dumps((given or function)(payload, attempt)))
