"""Writes run/kernels.json. Run `python -m tests.run.list_kernels` after a change of a kernel's arguments.

If KEYTAIL_CACHE_DIR is an empty folder, the seconds are measured again; otherwise the present list's seconds are kept.
"""

from __future__ import annotations

import functools
import importlib
import json
import pkgutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numba.core.types as types
import numpy as np
from numba.np.numpy_support import as_dtype

import keytail.kernels
from keytail.format import batch
from keytail.kernels import jit
from keytail.run import kernels
from tests.run.kernel_steps import steps

PATH = Path(kernels.__file__).with_name("kernels.json")
Calls = dict[tuple[str, str], set[str]]


@functools.cache
def _dtypes() -> dict[Any, str]:
    """Return the names of keytail's dtypes, by Numba type."""
    found = {}
    for info in pkgutil.walk_packages(keytail.kernels.__path__, "keytail.kernels."):
        importlib.import_module(info.name)
    for module in [module for name, module in sorted(sys.modules.items()) if name.startswith("keytail.kernels.")]:
        found |= {value: f"{module.__name__}:{name}" for name, value in vars(module).items() if _is_record(value)}
    found |= {value: f"{batch.__name__}:{name}" for name, value in vars(batch).items() if _is_record(value)}
    return {dtype: name.removeprefix("keytail.") for dtype, name in found.items()}


def _is_record(value: object) -> bool:
    return isinstance(value, np.dtype) and value.names is not None


def spec_of(kind: Any) -> Any:
    """Return the type as `kernels.type_of` reads it."""
    if isinstance(kind, types.BaseTuple):
        owner = getattr(kind, "instance_class", tuple)
        name = "" if owner is tuple else f"{owner.__module__.removeprefix('keytail.')}:{owner.__name__}"
        spec: Any = [name, *map(spec_of, kind)]
    elif isinstance(kind, types.Array):
        spec = f"{spec_of(kind.dtype)}[{kind.ndim}{kind.layout}{'' if kind.mutable else 'r'}]"
    elif isinstance(kind, types.Record):
        spec = _dtypes()[as_dtype(kind)]
    else:
        spec = "boolean" if kind == types.boolean else str(kind)
    assert kernels.type_of(spec) == kind, (spec, kind)
    return spec


def calls() -> Calls:
    """Return the commands that call each kernel, by its name and the types of its arguments as JSON."""
    found: Calls = {}
    with tempfile.TemporaryDirectory() as home:
        for command, step in steps(home):
            for kernel in jit.KERNELS:
                kernel._reset_overloads()
            step()
            for kernel in jit.KERNELS:
                name = f"{kernel.py_func.__module__.removeprefix('keytail.kernels.')}:{kernel.__name__}"
                for signature in kernel.signatures:
                    found.setdefault((name, json.dumps([*map(spec_of, signature)])), set()).add(command)
    # A kernel that other commands also call is not rare.
    return {key: commands - {kernels.RARE} or commands for key, commands in found.items()}


def _measured() -> dict[tuple[str, str], float]:
    """Return the CPU seconds of the compilation of each kernel, without that of kernels that earlier steps compiled.
    """
    seconds: dict[tuple[str, str], float] = {}
    for info in pkgutil.walk_packages(keytail.kernels.__path__, "keytail.kernels."):
        importlib.import_module(info.name)
    for kernel in jit.KERNELS:
        kernel.compile = _timed(kernel, kernel.compile, seconds)
    calls()
    return seconds


def _timed(kernel: Any, compile_: Any, seconds: dict[tuple[str, str], float]) -> Any:
    def timed(signature: Any) -> Any:
        start_s = time.process_time()
        made = compile_(signature)
        if sum(kernel.stats.cache_misses.values()):
            name = f"{kernel.py_func.__module__.removeprefix('keytail.kernels.')}:{kernel.__name__}"
            key = name, json.dumps([*map(spec_of, signature)])
            seconds.setdefault(key, time.process_time() - start_s)
        return made

    return timed


def main() -> None:
    before = {(item.kernel, json.dumps(item.types)): item.seconds for item in kernels.kernels_of(None)}
    seconds = before | _measured() if not jit.names_in_cache() else before
    listed = sorted(calls().items(), key=lambda item: (-seconds.get(item[0], 0.0), item[0]))
    lines = [
        json.dumps({"kernel": key[0], "commands": sorted(commands), "seconds": round(seconds.get(key, 0.0), 1),
                    "types": json.loads(key[1])})
        for key, commands in listed
    ]  # fmt: skip
    PATH.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
