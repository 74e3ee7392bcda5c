"""The `kernel` decorator: compiles the functions of this package and caches the compiled code.

Numba notices a changed source file but not a changed callee, so the name of the cache folder is a digest of all kernel
sources, the versions that affect the generated code, and the choice of native or fallback functions.

Compiled code runs with all rights of this process. A folder or file of the cache is therefore used only if it belongs
to root or to the user that started this process, and nobody else may write to it; each file is checked by the
descriptor that it is read from. If one is not trusted, one warning is printed, and each process compiles the kernels
itself. A cache that this user may not write to, such as in an image, is still read.

A process that needs a kernel which another process is compiling waits up to 60 s for the kernel's file, if the cache is
writable, instead of compiling the kernel too. Waiting only saves time: each compiled signature has a file name of its
own, even if two processes compile at once.

Numba loads from the folder only code that was compiled for the same CPU name and features, or for the values of
NUMBA_CPU_NAME and NUMBA_CPU_FEATURES.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import io
import os
import pickle
import secrets
import shutil
import signal
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from typing import Any

import numba
from numba import njit
from numba.core import caching
from numba.core.compiler_lock import global_compiler_lock

from keytail import console
from keytail.acting_user import as_caller
from keytail.kernels import native
from keytail.kernels.compile_lock import CompileLock

UNTRUSTED: list[str] = []  # the first folder or file that other users may have written, if any
_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def _digest() -> str:
    """Return the name of the cache folder: a digest of everything that affects the compiled code, except the CPU."""
    digest = hashlib.sha256(native.CHOICE.encode())
    for package in ("numba", "llvmlite", "numpy", "xxhash", "crc32c"):
        digest.update(f"\n{package}=={metadata.version(package)}".encode())
    # The package may be an editable install, a wheel or a zip on a Spark worker.
    for name, source in sorted(_sources(resources.files("keytail.kernels"), ""), key=lambda item: item[0]):
        digest.update(f"\n{name}\n".encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()[:24]


def _sources(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    """Yield the path below the package, and the file, of each kernel source."""
    for item in folder.iterdir():
        if item.is_dir():
            yield from _sources(item, f"{prefix}{item.name}/")
        elif item.name.endswith(".py"):
            yield prefix + item.name, item


def _cache_folder() -> tuple[str | None, bool, str]:
    """Return a cache folder for the processes of this user, or None; whether this process can write to the folder; and
    the reason if it cannot."""
    base = os.environ.get("KEYTAIL_CACHE_DIR")
    if not base:
        base = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "keytail")
    if not os.path.isabs(base):  # "~" is not expanded if there is no home directory
        return None, False, f"the path {base} is not absolute" if base[:1] != "~" else "the user has no home directory"
    folder = os.path.join(base, _digest())
    for item, mode in ((base, 0o755), (folder, 0o700)):
        why = "other users own it or may write to it"
        try:
            os.makedirs(item, mode, exist_ok=True)
        except OSError as problem:
            why = problem.strerror or str(problem)
        if not _is_trusted_folder(item):
            return None, False, f"{item}: {why}"
    try:
        with tempfile.TemporaryFile(dir=folder):
            return folder, True, ""
    except OSError as problem:
        why = f"{folder}: {problem.strerror}"
        return folder if os.access(folder, os.R_OK | os.X_OK) else None, False, why


def _is_trusted_folder(path: str) -> bool:
    try:
        facts = os.stat(path)
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and _is_trusted(path, facts)


def _is_trusted(path: str, facts: os.stat_result) -> bool:
    """Return whether only root or the user that started this process can have written to `path`; if not, print a
    warning, once.

    The real user is decisive: a process that acts for the owner of log dirs must not run that user's code as its own.
    """
    if facts.st_uid in (0, os.getuid()) and not facts.st_mode & _OF_OTHERS:
        return True
    if not UNTRUSTED:
        UNTRUSTED.append(path)
        console.print_message(
            f"keytail: the cache of compiled kernels is not used: {path} belongs to user id {facts.st_uid} with mode "
            f"{stat.S_IMODE(facts.st_mode):o}, and any user with write access there could make this process run other "
            f"code. Each process compiles the kernels itself, which takes up to a minute. Remove {path}, or set "
            "KEYTAIL_CACHE_DIR to a directory that belongs to this user or root and that no other user can write to.",
            "warning",
        )
    return False


def _read(path: str) -> bytes:
    """Return the bytes of a cache file; empty if it does not exist or is not trusted."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    with open(fd, "rb") as file:
        facts = os.fstat(fd)
        return file.read() if stat.S_ISREG(facts.st_mode) and _is_trusted(path, facts) else b""


class _TrustedFiles(caching.IndexDataCacheFile):
    """Reads cache files as Numba does, but only trusted files: reading a file executes code in it.

    Numba numbers the files of a kernel's signatures by an index that another process may be replacing. In that case two
    signatures would get the same name, and a call might use the code for arguments of other types. Random names prevent
    this; a process that replaces the index with an older index only makes other processes compile again.
    """

    def _data_name(self, number: int) -> str:
        return f"{self._index_name.removesuffix('.nbi')}.{secrets.token_hex(8)}.nbc"

    def _load_index(self) -> dict[Any, str]:
        file = io.BytesIO(_read(self._index_path))
        if not file.getbuffer().nbytes or pickle.load(file) != self._version:
            return {}
        stamp, names_by_key = pickle.load(file)
        return names_by_key if stamp == self._source_stamp else {}

    def _load_data(self, name: str) -> Any:
        data = _read(self._data_path(name))
        if not data:
            raise FileNotFoundError(name)  # Numba then compiles the kernel
        return pickle.loads(data)

    @contextlib.contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[Any]:
        with super()._open_for_write(filepath) as file:
            os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode) & ~_OF_OTHERS)
            yield file


class _Locator(caching.UserProvidedCacheLocator):
    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        """Return one name for all installations of this package: the cache's folder is a digest of its kernels."""
        package = os.path.dirname(os.path.abspath(__file__))
        path = os.path.abspath(py_file)
        is_own = path.startswith(package + os.sep)
        return super().get_suitable_cache_subpath("/kernels" + path.removeprefix(package) if is_own else path)


class _Folder(_Locator):
    def ensure_cache_path(self) -> None:
        os.makedirs(self.get_cache_path(), 0o755, exist_ok=True)


class _Results(caching.CompileResultCacheImpl):
    _locator_classes = (_Folder, *caching.CompileResultCacheImpl._locator_classes[1:])


class _TrustedCache(caching.FunctionCache):
    """The cache of the user that started this process, even while the process acts as another user."""

    _impl_class = _Results

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        locator, base = self._impl.locator, self._impl.filename_base
        self._cache_file = _TrustedFiles(self._cache_path, base, locator.get_source_stamp())
        self._lock = CompileLock(os.path.join(self._cache_path, f"{base}.lock"))
        if not _is_trusted_folder(self._cache_path):
            self.disable()

    @as_caller()
    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the cached code, or None, after which Numba compiles under the kernel's lock, until
        `end_of_compiling`."""
        found = super().load_overload(sig, target_context)
        if found is None and self._enabled and self._lock.acquire():
            found = super().load_overload(sig, target_context)  # another process may have saved the code
        return found

    def end_of_compiling(self) -> None:
        self._lock.release()

    @as_caller()
    def is_being_compiled(self) -> bool:
        return self._lock.is_taken()

    @as_caller()
    def has(self, sig: Any, target_context: Any) -> bool:
        """Return whether there is code for these types and this CPU."""
        name = self._cache_file._load_index().get(self._index_key(sig, target_context.codegen()))
        return name is not None and os.path.exists(self._cache_file._data_path(name))

    @as_caller()
    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(OSError):  # for example a full disk; this process can still use the compiled code
            super().save_overload(sig, data)


class _NothingToMake(_Locator):
    """Skips Numba's check that it can write to a folder, which Numba makes even before reading from the folder."""

    def ensure_cache_path(self) -> None:
        pass


class _ReadOnlyResults(caching.CompileResultCacheImpl):
    _locator_classes = (_NothingToMake,)


class _ReadOnlyCache(_TrustedCache):
    _impl_class = _ReadOnlyResults

    @as_caller()
    def load_overload(self, sig: Any, target_context: Any) -> Any:
        return caching.FunctionCache.load_overload(self, sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        pass


CACHE_FOLDER, IS_WRITABLE, WHY_NOT_WRITABLE = _cache_folder()
# All kernels of the imported modules, except kernels that are always inlined into others.
KERNELS: list[Any] = []


def kernel(function: Callable[..., Any] | None = None, *, allocates: bool = False, **options: Any) -> Any:
    """Return the compiled function; used as `@kernel` or `@kernel(inline="always")`: `numba.njit` without the GIL, with
    a cache.

    The error model is NumPy's. Without `allocates` a kernel creates no arrays, and references to its array arguments
    are not counted: counting them in each call between functions takes more time than a small batch does. Without
    `allocates`, Numba refuses to compile a kernel that allocates. Never use `parallel=True`: its thread pool does not
    survive the fork of a Spark worker.
    """
    if function is None:
        return lambda wrapped: kernel(wrapped, allocates=allocates, **options)
    options = {"nogil": True, "error_model": "numpy", "_nrt": allocates, **options}
    made = njit(**options)(function)
    if not is_off():
        _give_cache(made)
        if options.get("inline") != "always":
            KERNELS.append(made)
    return made


def is_off() -> bool:
    """Return whether nothing is compiled (NUMBA_DISABLE_JIT)."""
    return bool(numba.config.DISABLE_JIT)


def _give_cache(made: Any) -> None:
    """Protect the compilation of a kernel from signals, and give the kernel its cache, if there is a folder."""
    made.compile = _in_one_piece(type(made).compile.__get__(made), None)
    if CACHE_FOLDER is None:
        return
    # Numba reads this setting only while the cache is created; afterwards the setting is restored for other users of
    # Numba in this process.
    previous = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = CACHE_FOLDER
    try:
        made._cache = _TrustedCache(made.py_func) if IS_WRITABLE else _ReadOnlyCache(made.py_func)
        made.compile = _in_one_piece(type(made).compile.__get__(made), made._cache)
    except RuntimeError:  # "no locator available": Numba cannot stamp the sources
        pass
    finally:
        numba.config.CACHE_DIR = previous


def _in_one_piece(compile_for: Callable[[Any], Any], cache: _TrustedCache | None) -> Callable[[Any], Any]:
    """Return a wrapper of Numba's `compile`, which loads code, or compiles and saves it: no signal interrupts the
    wrapped call, and the kernel's lock is released after it."""

    @functools.wraps(compile_for)
    def compile_(sig: Any) -> Any:
        # Numba's `compile` takes the global lock as well, which is reentrant. The global lock is held until the
        # kernel's lock is released: otherwise another thread of this process could find that lock taken, and compile.
        with _signals_afterwards(), global_compiler_lock:
            try:
                return compile_for(sig)
            finally:
                if cache is not None:
                    cache.end_of_compiling()

    return compile_


@contextlib.contextmanager
def _signals_afterwards() -> Iterator[None]:
    """Handle signals that arrive within the context at its end: an exception that is raised while LLVM calls Python is
    lost, and leaves a kernel without code."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in before.items() if callable(handler)}
    for number in before:
        signal.signal(number, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in arrived:
            signal.raise_signal(late)


def is_compiled(made: Any, types: tuple[Any, ...]) -> bool:
    """Return whether this process has the code of a kernel for arguments of these Numba types, or can load it."""
    cache = made._cache
    return types in made.overloads or (isinstance(cache, _TrustedCache) and cache.has(types, made.targetctx))


def is_being_compiled(made: Any) -> bool:
    """Return whether another process is compiling this kernel for the cache."""
    return isinstance(made._cache, _TrustedCache) and made._cache.is_being_compiled()


@as_caller()
def names_in_cache() -> set[str]:
    """Return the kernels that have code in the cache, for any types and any CPU, as `module:name`."""
    found = set()
    for folder, _, files in os.walk(CACHE_FOLDER or os.devnull):
        # Numba names the folder after the folder of the source, followed by a digest.
        package = os.path.basename(folder).rpartition("_")[0]
        prefix = "" if package == "kernels" else f"{package}."
        for name in files:
            if name.endswith(".nbi"):  # the form is module.function-line.python.nbi
                module, _, function = name.partition("-")[0].partition(".")
                found.add(f"{prefix}{module}:{function}")
    return found


@as_caller()
def use_cache_of_this_run() -> None:
    """Use a temporary cache, removed when this process exits, that its child processes share.

    Called if this user may not write to any cache folder.
    """
    global CACHE_FOLDER, IS_WRITABLE
    base = tempfile.mkdtemp(prefix="keytail-kernels-")
    atexit.register(_remove, base, os.getpid())
    os.environ["KEYTAIL_CACHE_DIR"] = base
    CACHE_FOLDER, IS_WRITABLE, _ = _cache_folder()
    for made in KERNELS:
        _give_cache(made)


@as_caller()
def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
