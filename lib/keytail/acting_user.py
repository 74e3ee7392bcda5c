"""Changes the user that this process works as.

When started as root on log dirs of another user, keytail works as that user: the process takes the effective ids and
groups of that user, and so has no more rights to files than the owner of the log dirs. The real and saved ids remain
root's, for two reasons: the owner can neither signal nor trace such a process; and `as_caller` can restore root's
rights to files in one thread, for files outside of log dirs that the caller has installed or names (packages, compiled
kernels, reports). Code that omits `as_caller` fails with "Permission denied" and does no harm.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pwd
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_GET_PARENT_DEATH_SIGNAL, _SET_PARENT_DEATH_SIGNAL = 2, 1  # operations of prctl(2)
_UNCHANGED = ctypes.c_uint(0xFFFFFFFF)  # with this id, setfsuid and setfsgid only return the current id


def caller_name() -> str:
    """Return the name of the user that started this process, or the id of a user without a name."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


@dataclass(frozen=True)
class User:
    """Effective ids of a process: user id, group id, supplementary group ids."""

    uid: int
    gid: int
    groups: tuple[int, ...]

    def __str__(self) -> str:
        try:
            return f"user {pwd.getpwuid(self.uid).pw_name} (uid {self.uid})"
        except KeyError:
            return f"user id {self.uid}"


_caller: User | None = None  # the user that started the process, while it works as another user


def user_of(uid: int, gid: int) -> User:
    """Return the user with the id `uid` and its groups. The group id is `gid`, the group of the user's files, if the
    user is a member of that group or if the system has no name for the user; in all other cases it is the user's own
    group.
    """
    try:
        known = pwd.getpwuid(uid)
    except KeyError:
        return User(uid, gid, (gid,))
    groups = tuple(os.getgrouplist(known.pw_name, known.pw_gid))
    return User(uid, gid if gid in groups else known.pw_gid, groups)


def current() -> User:
    """Return the user that this process works as now."""
    return User(os.geteuid(), os.getegid(), tuple(os.getgroups()))


def works_as_another_user() -> bool:
    """Return whether this process works as a user that did not start it."""
    return _caller is not None


def is_root() -> bool:
    """Return whether this process was started with root's rights, and has these rights or can regain them."""
    return works_as_another_user() or os.geteuid() == 0


def become(user: User) -> None:
    """Work as `user`, in all threads, until `give_back`. Raises OSError if the system does not allow it."""
    global _caller  # noqa: PLW0603 (ids are per process, and so is this variable)
    with _parent_death_signal_kept():
        _caller = _caller or current()
        try:
            os.setgroups(user.groups)
            os.setegid(user.gid)
            os.seteuid(user.uid)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error has the cause
                give_back()
            _caller = None
            raise
    _import_as_caller()


def give_back() -> None:
    """Reverse `become`: work as the user that started the process, in all threads."""
    global _caller  # noqa: PLW0603 (as in `become`)
    if _caller is None:
        return
    with _parent_death_signal_kept():
        os.seteuid(_caller.uid)
        os.setegid(_caller.gid)
        os.setgroups(_caller.groups)
        _caller = None


@contextlib.contextmanager
def working_as(user: User) -> Iterator[None]:
    """Work as `user` within the context, if this process runs as root and `user` is not root."""
    if os.geteuid() != 0 or user.uid == 0:
        yield
        return
    become(user)
    try:
        yield
    finally:
        give_back()


def on_workers(task: Callable[[Iterator[Any]], Iterator[Any]]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a wrapper of `task`, a function for mapInArrow: workers that run as root run the task as this process's
    current user.
    """
    return functools.partial(_as_user, current(), task)


def _as_user(user: User, task: Callable[[Iterator[Any]], Iterator[Any]], batches: Iterator[Any]) -> Iterator[Any]:
    with working_as(user):
        yield from task(batches)


@contextlib.contextmanager
def as_caller() -> Iterator[None]:
    """Give this thread, and no other, the caller's rights to files within the context. Does nothing if the process
    works as the user that started it. Threads that are started within the context, and processes that are forked
    without an exec, keep these rights, so none of them may access log dirs. A program that is executed loses them."""
    if _caller is None:
        yield
        return
    before = _file_ids()
    try:
        _set_file_ids(_caller.uid, _caller.gid)
        yield
    finally:
        _set_file_ids(*before)


def popen_as_caller(*arguments: Any, preexec_fn: Callable[[], object] | None = None, **options: Any) -> Any:
    """Return a subprocess.Popen of a program that runs as the user that started this process."""

    def before_exec() -> None:
        give_back()
        if preexec_fn is not None:
            preexec_fn()

    options["preexec_fn"] = before_exec if works_as_another_user() else preexec_fn
    return subprocess.Popen(*arguments, **options)


def _file_ids() -> tuple[int, int]:
    libc = _libc()
    return libc.setfsuid(_UNCHANGED) & 0xFFFFFFFF, libc.setfsgid(_UNCHANGED) & 0xFFFFFFFF


def _set_file_ids(uid: int, gid: int) -> None:
    """Set the ids that Linux uses for this thread's access to files. Raises PermissionError if they did not change."""
    libc = _libc()
    with _parent_death_signal_kept():
        libc.setfsgid(ctypes.c_uint(gid))
        libc.setfsuid(ctypes.c_uint(uid))
    if _file_ids() != (uid, gid):
        raise PermissionError(f"cannot use files as user id {uid}, group id {gid}")


@contextlib.contextmanager
def _parent_death_signal_kept() -> Iterator[None]:
    """Restore the parent death signal of this thread (prctl), which the kernel clears when the thread's ids change.
    """
    libc, number = _libc(), ctypes.c_int(0)
    libc.prctl(_GET_PARENT_DEATH_SIGNAL, ctypes.byref(number))
    parent = os.getppid()
    try:
        yield
    finally:
        if number.value:
            libc.prctl(_SET_PARENT_DEATH_SIGNAL, number.value)
            if os.getppid() != parent:  # the parent died while no signal was set
                os.kill(os.getpid(), number.value)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


@functools.cache
def _import_as_caller() -> None:
    """Make imports find and load modules with the caller's rights: Python and packages may be readable by root only.

    `import` and importlib.import_module both call `_find_and_load` for a module that is not loaded yet.
    """
    bootstrap: Any = sys.modules["_frozen_importlib"]
    find_and_load = bootstrap._find_and_load

    def find_and_load_as_caller(*arguments: Any) -> Any:
        with as_caller():
            return find_and_load(*arguments)

    bootstrap._find_and_load = find_and_load_as_caller
