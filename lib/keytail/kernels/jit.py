"""The `kernel` decorator: how functions of this package are compiled, and where the compiled code is kept.

Numba notices a changed source file but not a changed callee, so the cache folder is named by a digest of all
kernel sources, the versions that decide what is generated, and the native-or-fallback choice. Where it cannot
be written kernels still work: they are compiled anew in each process, without an error.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from importlib import metadata, resources
from typing import Any

import numba
from numba import njit

from keytail.kernels import native


def _digest() -> str:
    """Names one generation of compiled code."""
    digest = hashlib.sha256(native.CHOICE.encode())
    for package in ("numba", "llvmlite", "numpy", "xxhash", "crc32c"):
        digest.update(f"\n{package}=={metadata.version(package)}".encode())
    # The package may be an editable install, a wheel or a zip on a Spark worker.
    sources = (item for item in resources.files("keytail.kernels").iterdir() if item.name.endswith(".py"))
    for source in sorted(sources, key=lambda item: item.name):
        digest.update(f"\n{source.name}\n".encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


def _cache_folder() -> str | None:
    """A folder that this process can write, for it and others of the same user; None if there is none.

    Compiled code is loaded from it, so it is never a folder that other users could have made, as one in /tmp.
    """
    base = os.environ.get("KEYTAIL_CACHE_DIR")
    if not base:
        base = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "keytail")
    if not os.path.isabs(base):  # no home: "~" stays as it is
        return None
    folder = os.path.join(base, _digest())
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return None


CACHE_FOLDER = _cache_folder()
# All kernels of the modules that are imported, but for those that are only ever part of others.
KERNELS: list[Any] = []


def kernel(function: Callable[..., Any] | None = None, *, allocates: bool = False, **options: Any) -> Any:
    """`@kernel` or `@kernel(inline="always")`: `numba.njit` without the GIL, C's error model, a cache.

    Without `allocates` it makes no arrays, and references to those it is given are not counted: counting them in each
    call between functions takes more time than a small batch does. Numba refuses to compile one that allocates then.
    Never `parallel=True`: its thread pool does not survive the fork of a Spark worker.
    """
    if function is None:
        return lambda wrapped: kernel(wrapped, allocates=allocates, **options)
    options = {"nogil": True, "error_model": "numpy", "_nrt": allocates, **options}
    made = _made(function, options)
    if not numba.config.DISABLE_JIT and options.get("inline") != "always":
        KERNELS.append(made)
    return made


def _made(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    if CACHE_FOLDER is None or numba.config.DISABLE_JIT:
        return njit(**options)(function)
    # Numba reads its setting once, here; it is put back so that other users of Numba here keep theirs.
    previous = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = CACHE_FOLDER
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # "no locator available": sources that Numba cannot stamp
        return njit(**options)(function)
    finally:
        numba.config.CACHE_DIR = previous
