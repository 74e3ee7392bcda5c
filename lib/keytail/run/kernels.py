"""Compiles the kernels of a command before its tasks run, in parallel processes, once for each host and user.

`kernels.json` lists the kernels that each command calls, slowest first, with the types of their arguments and the
seconds that compiling each kernel took. `python -m tests.run.list_kernels` creates `kernels.json` by running all
operations on small logs. Kernels listed as RARE are needed for few logs: they are compiled when they are called, or by
`doctor --warm`.
"""

from __future__ import annotations

import functools
import gc
import json
import pkgutil
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from keytail.acting_user import as_caller
from keytail.console import print_message
from keytail.errors import UsageProblem
from keytail.run.memory import cores
from keytail.run.processes import Processes
from keytail.threads import inheriting

RARE = "rare"
_LIST = "kernels.json"
_SET_DIRECTORY = "Set KEYTAIL_CACHE_DIR to a directory to which only this user and root may write"
# Seconds between two reports of progress; the end of the first kernel is reported at once.
_PACE_S = 5.0


class Listed(NamedTuple):
    """An entry of kernels.json: a kernel (`module:name` in keytail.kernels), the types of its arguments (the format is
    that of `type_of`), the commands that need it, and the seconds that compiling took."""

    kernel: str
    types: list[Any]
    commands: list[str]
    seconds: float


@functools.cache
@as_caller()
def _listed() -> tuple[Listed, ...]:
    return tuple(Listed(**item) for item in json.loads(resources.files("keytail.run").joinpath(_LIST).read_text()))


def kernels_of(commands: Collection[str] | None) -> list[Listed]:
    """Return the entries of the kernels that these commands need, slowest first; None: all entries, also RARE ones."""
    return [item for item in _listed() if commands is None or not {*commands}.isdisjoint(item.commands)]


def type_of(spec: Any) -> Any:
    """Return the Numba type of an argument from its description in kernels.json.

    A description is the name of a type, such as `int64`, or of a dtype of keytail, such as `format.batch:BATCH_TABLE`.
    An array has its dimensions and layout in brackets, as in `uint8[1C]`, and `r` if it is read-only. A tuple is a list
    of its class ("" for a plain tuple) and the types of its items.
    """
    from numba import types  # noqa: PLC0415 (brings in the compiler)
    from numba.np.numpy_support import from_dtype  # noqa: PLC0415 (the same)

    if isinstance(spec, list):
        kind = pkgutil.resolve_name(f"keytail.{spec[0]}") if spec[0] else tuple
        return types.BaseTuple.from_types([type_of(item) for item in spec[1:]], kind)
    found = re.fullmatch(r"([\w.:]+)(?:\[(\d)([CFA])(r?)\])?", spec)
    assert found is not None, spec
    name, dimensions, layout, read_only = found.groups()
    item = from_dtype(pkgutil.resolve_name(f"keytail.{name}")) if ":" in name else getattr(types, name)
    return item if layout is None else types.Array(item, int(dimensions), layout, readonly=bool(read_only))


def _missing(listed: Iterable[Listed]) -> list[tuple[Any, tuple[Any, ...], float]]:
    """Return (kernel, types, seconds) of each listed kernel that is neither compiled in this process nor in the cache.
    """
    from keytail.kernels import jit  # noqa: PLC0415 (brings in the compiler)

    found = []
    for item in listed:
        kernel = pkgutil.resolve_name(f"keytail.kernels.{item.kernel}")
        types = tuple(map(type_of, item.types))
        if not jit.is_compiled(kernel, types):
            found.append((kernel, types, item.seconds))
    return found


def expected_seconds(commands: Collection[str] | None = None) -> float:
    """Return the estimated seconds for compiling, on this host, the kernels of these commands that the cache lacks.

    Only file names in the cache are compared, so that no kernel is loaded. A kernel with code for another CPU, or for
    other types of arguments, counts as compiled.
    """
    from keytail.kernels import jit  # noqa: PLC0415 (brings in the compiler)

    present = jit.names_in_cache()
    return _seconds([item.seconds for item in kernels_of(commands) if item.kernel not in present])


def report_uncompiled(command: str) -> None:
    """Print a message on standard error if a run of this command on this host would have to compile kernels first."""
    from keytail.kernels import jit  # noqa: PLC0415 (brings in the compiler)

    seconds = expected_seconds([command])
    if not seconds:
        return
    if not jit.IS_WRITABLE:
        _warn_of_no_cache(seconds)
        return
    print_message(
        f"keytail: kernels are not compiled for this user, so `{command}` takes about {seconds:.0f} s more. Run "
        "`keytail doctor --warm` before the broker is stopped"
    )


def _seconds(each: Collection[float]) -> float:
    return max(*each, sum(each) / cores()) if each else 0.0


def is_on_this_host(master: str | None) -> bool:
    """Return whether tasks run on the driver's host with this master of Spark; None stands for `local[*]`."""
    return master is None or master.startswith("local")


def note_on_standard_error(line: str) -> None:
    """Print a line on standard error. Commands without a display of progress pass this function as `note`."""
    print_message(f"keytail: {line}")


def compile_kernels(
    commands: Collection[str] | None, note: Callable[[str], object] = note_on_standard_error
) -> int:
    """Compile the kernels of these commands (None: all kernels) that the cache lacks; return their number.

    `note` is called with lines about the progress. This function forks, so it must be called in the main thread, before
    other threads start. A signal ends the forked processes. If this user may not write to the cache, a warning is
    printed, unless the folder was reported as untrusted, and the kernels are compiled for this run only.
    """
    from keytail.kernels import jit  # noqa: PLC0415 (brings in the compiler)

    missing = [] if jit.is_off() else _missing(kernels_of(commands))
    if not missing:
        return 0
    if not jit.IS_WRITABLE:
        _warn_of_no_cache(_seconds([seconds for *_, seconds in missing]))
        jit.use_cache_of_this_run()
        missing = _missing(kernels_of(commands))  # the new cache also lacks kernels that the read-only cache has
        where = "for this run only"
    else:
        where = f"stored for later runs in {jit.CACHE_FOLDER}"
    count, total = min(cores(), len(missing)), len(missing)
    note(f"compiling {total} kernels, {where}, slowest first")
    start_s = last_s = time.monotonic()
    ended_s: dict[int, float] = {}
    lock, over = threading.Lock(), threading.Event()

    def report(is_due: bool = False) -> None:
        nonlocal last_s
        with lock:
            now_s = time.monotonic()
            if over.is_set() or not (is_due or now_s - last_s >= _PACE_S):
                return
            last_s = now_s
            left_s = _left_s([seconds for *_, seconds in missing], ended_s, count, now_s - start_s)
            left = "" if left_s is None else f", about {left_s:.0f} s left"
            note(f"{len(ended_s)} of {total} kernels are compiled (at {now_s - start_s:.0f} s){left}")

    def on_end(number: int) -> None:
        with lock:
            ended_s[number] = time.monotonic() - start_s
            is_first = len(ended_s) == 1
        report(is_due=is_first)

    def report_while_none_ends() -> None:
        while not over.wait(_PACE_S):
            report()

    with Processes(count, lambda number, attempt: _compile_here(*missing[number][:2])) as workers:
        threading.Thread(target=inheriting(report_while_none_ends), name="kernels", daemon=True).start()
        try:
            workers.run(range(total), on_end=on_end)
        finally:
            over.set()
    with lock:  # another thread may be printing a line
        note(f"compiled {total} kernels in {time.monotonic() - start_s:.0f} s")
    return total


def _left_s(expected: Sequence[float], ended_s: Mapping[int, float], workers: int, now_s: float) -> float | None:
    """Return the estimated seconds until all kernels are compiled; None if no kernel has been compiled yet.

    `expected` has the seconds of each kernel on an idle machine, in the order in which their compilations begin.
    `ended_s` has the times at which compilations ended, by the number of the kernel. Times, and the present time
    `now_s`, are seconds since the start of the first compilation.
    """
    began_s = [0.0] * workers + sorted(ended_s.values())  # a worker begins a kernel when it has compiled another
    if not (expected_s := sum(expected[number] for number in ended_s)):
        return None
    factor = sum(end_s - began_s[number] for number, end_s in ended_s.items()) / expected_s
    left_s = [
        max(seconds * factor - (now_s - began_s[number] if number < len(began_s) else 0.0), 0.0)
        for number, seconds in enumerate(expected) if number not in ended_s
    ]  # fmt: skip
    return max(*left_s, sum(left_s) / workers, 0.0)


def _compile_here(kernel: Any, types: tuple[Any, ...]) -> None:
    """Compile a kernel in this process, which is used only for compiling."""
    gc.disable()  # garbage collection would take a tenth of the time
    kernel.compile(types)


def compile_on_worker(command: str) -> None:
    """Compile missing kernels in this process, a Spark worker, together with the other workers of its host. Each worker
    compiles kernels that no other worker is compiling; then it waits for the kernels that others are compiling."""
    if command in _done_here:
        return
    from keytail.kernels import jit  # noqa: PLC0415 (brings in the compiler)

    missing = [] if jit.is_off() else _missing(kernels_of([command]))
    for is_last in (False, True):
        for kernel, types, _ in missing:
            if is_last or not jit.is_being_compiled(kernel):
                kernel.compile(types)
    _done_here.add(command)


_done_here: set[str] = set()


def _warn_of_no_cache(seconds: float) -> None:
    from keytail.kernels import jit  # noqa: PLC0415 (brings in the compiler)

    if jit.UNTRUSTED:  # the folder was reported when it was rejected
        return
    print_message(
        f"keytail: compiled kernels cannot be stored ({jit.WHY_NOT_WRITABLE}), so each run compiles all its kernels, "
        f"which takes about {seconds:.0f} s. {_SET_DIRECTORY}",
        "warning",
    )


def refuse_without_cache() -> None:
    """Raise UsageProblem if this user's compiled kernels cannot be stored for later runs."""
    from keytail.kernels import jit  # noqa: PLC0415 (brings in the compiler)

    if not jit.IS_WRITABLE:
        raise UsageProblem(
            f"compiled kernels cannot be stored, so there is nothing to compile in advance: {jit.WHY_NOT_WRITABLE}",
            remedy=_SET_DIRECTORY,
            slug="no-kernel-cache",
        )
