"""The `kernel` decorator: how functions of this package are compiled, and where the compiled code is kept.

Numba notices a changed source file but not a changed callee, so the cache folder is named by a digest of all kernel
sources, the versions that decide what is generated, and the native-or-fallback choice. Where it cannot be written, what
is there already is used all the same, if only root or this user can have put it there, as in an image. The rest is
compiled anew in each process, without an error.

Numba takes from the folder only what was compiled for the same CPU: name and features, or those that NUMBA_CPU_NAME and
NUMBA_CPU_FEATURES say in its place.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from importlib import metadata, resources
from typing import Any

import numba
from numba import njit
from numba.core import caching

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


def _cache_folder() -> tuple[str | None, bool]:
    """A folder for this process and others of the same user, and whether it can write there; None if there is none.

    Compiled code is loaded from it, so it is never a folder that other users could have made, as one in /tmp.
    """
    base = os.environ.get("KEYTAIL_CACHE_DIR")
    if not base:
        base = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "keytail")
    if not os.path.isabs(base):  # no home: "~" stays as it is
        return None, False
    folder = os.path.join(base, _digest())
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder, True
    except OSError:
        return (folder if _is_safe(base) and _is_safe(folder) else None), False


def _is_safe(folder: str) -> bool:
    """That it is there, can be read, and only root or this user can have written what is in it."""
    try:
        found = os.stat(folder)
    except OSError:
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & others and os.access(folder, os.R_OK | os.X_OK)


class _NothingToMake(caching.UserProvidedCacheLocator):
    """Numba asks a folder whether it can be written before it reads there."""

    def ensure_cache_path(self) -> None:
        pass


class _ReadOnlyResults(caching.CompileResultCacheImpl):
    _locator_classes = (_NothingToMake,)


class _ReadOnlyCache(caching.FunctionCache):
    _impl_class = _ReadOnlyResults

    def save_overload(self, sig: Any, data: Any) -> None:
        pass


CACHE_FOLDER, IS_WRITABLE = _cache_folder()
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
        if IS_WRITABLE:
            return njit(cache=True, **options)(function)
        made = njit(**options)(function)
        made._cache = _ReadOnlyCache(function)
        return made
    except RuntimeError:  # "no locator available": sources that Numba cannot stamp
        return njit(**options)(function)
    finally:
        numba.config.CACHE_DIR = previous
