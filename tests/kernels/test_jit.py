from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numba
import numpy as np
import pytest

from keytail.kernels import jit
from keytail.kernels.jit import kernel
from tests.log_dirs import snapshot


def _run(code: str, before: Sequence[str] = (), **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*before, sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        check=False,
        text=True,
        timeout=600,
    )


_USE = """
    import numpy as np
    from keytail.kernels import jit
    from tests.kernels.a_kernel import add
    print(jit.CACHE_FOLDER, int(add(np.arange(5))), sum(add.stats.cache_hits.values()))
"""


@kernel(inline="always")
def _spin(a):
    x = 0.0
    for _ in range(200):
        for y in a:
            x += y * 0.5
    return x


@kernel
def _divide(a, b):
    return a / b


@pytest.mark.long
def test_a_second_process_loads_the_code_from_the_folder(tmp_path):
    outputs = [_run(_USE, KEYTAIL_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    assert all(o.returncode == 0 for o in outputs), outputs[0].stderr
    (folder,) = tmp_path.iterdir()
    assert outputs[0].stdout.split() == [str(folder), "10", "0"]
    assert outputs[1].stdout.split() == [str(folder), "10", "1"]
    assert folder.stat().st_mode & 0o077 == 0


@pytest.mark.long
def test_another_installation_of_the_same_version_loads_the_code_from_the_folder(tmp_path: Path) -> None:
    code = """
        import numpy as np
        from keytail.kernels import append, jit
        append.count(np.zeros(9, np.uint8), 9)
        print(append.__file__, sum(append.count.stats.cache_hits.values()), *jit.names_in_cache())
    """
    found = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keytail").symlink_to(Path(jit.__file__).parents[1])
        done = _run(code, PYTHONPATH=str(tmp_path / name), KEYTAIL_CACHE_DIR=str(tmp_path / "cache"))
        found.append(done.stdout.split())
    in_package = "keytail/kernels/append.py"
    assert found[0] == [str(tmp_path / "one" / in_package), "0", "append:count"]
    assert found[1] == [str(tmp_path / "other" / in_package), "1", "append:count"]


@pytest.mark.long
def test_without_a_writable_folder_there_is_no_cache_and_no_error(tmp_path):
    a_file = tmp_path / "file"
    a_file.write_bytes(b"")
    for environment in ({"HOME": str(a_file)}, {"HOME": "/proc"}, {"HOME": ""}):
        settings = {"KEYTAIL_CACHE_DIR": "", "XDG_CACHE_HOME": "", **environment}
        if not environment["HOME"]:
            settings["KEYTAIL_CACHE_DIR"] = str(a_file)
        result = _run(_USE, **settings)
        assert result.returncode == 0, result.stderr
        assert result.stdout.split() == ["None", "10", "0"]


# Without these capabilities, the modes of directories also apply to root.
_AS_ANY_USER = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []


@pytest.mark.long
def test_code_is_loaded_from_a_read_only_folder(tmp_path):
    """In an image, the user may not write to the folder, and nobody else can have put code there."""
    cache, settings = tmp_path / "cache", {"KEYTAIL_CACHE_DIR": str(tmp_path / "cache"), "HOME": "/nonexistent"}
    assert _run(_USE, **settings).stdout.split()[2] == "0"
    [folder] = cache.iterdir()
    _allow(cache, 0o555, 0o444)
    before = snapshot(cache)
    try:
        reads = _run(_USE, before=_AS_ANY_USER, **settings)
        assert reads.stdout.split() == [str(folder), "10", "1"], reads.stderr
        # There is no code for another CPU, and none can be saved.
        other = {**settings, "NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": ""}
        compiles = _run(_USE, before=_AS_ANY_USER, **other)
        assert compiles.stdout.split() == [str(folder), "10", "0"], compiles.stderr
        assert snapshot(cache) == before
        for item in (cache, folder):
            item.chmod(0o575)  # others could have put code there
            refuses = _run(_USE, before=_AS_ANY_USER, **settings)
            assert refuses.stdout.split() == ["None", "10", "0"], refuses.stderr
            item.chmod(0o555)
        if os.geteuid() == 0:
            os.chown(folder, 65534, -1)
            refuses = _run(_USE, before=_AS_ANY_USER, **settings)
            assert refuses.stdout.split() == ["None", "10", "0"], refuses.stderr
    finally:
        _allow(cache, 0o755, 0o644)


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """Return a cache with the code of `add`."""
    cache = tmp_path_factory.mktemp("filled") / "cache"
    assert _run(_USE, KEYTAIL_CACHE_DIR=str(cache)).stdout.split()[2] == "0"
    return cache


UNTRUSTED = [
    ("", "another user's"),
    ("*", "another user's"),
    ("*", "writable for others"),
    ("*/*", "writable for its group"),
    ("*/*/a_kernel*.nbi", "another user's"),
    ("*/*/a_kernel*.nbi", "writable for others"),
    ("*/*/a_kernel*.nbc", "another user's"),
    ("*/*/a_kernel*.nbc", "writable for its group"),
]
# Executes the module that looks for the cache again for each cache, which has the effect of separate processes.
_USE_EACH = """
    import importlib, json, os, sys
    import numpy as np
    from keytail import console
    from keytail.kernels import jit
    messages, results = [], []
    console.print_message = lambda text, *_: messages.append(text)
    for cache in json.loads(sys.argv[1]):
        os.environ["KEYTAIL_CACHE_DIR"] = cache
        messages.clear()
        importlib.reload(jit)
        sys.modules.pop("tests.kernels.a_kernel", None)
        add = importlib.import_module("tests.kernels.a_kernel").add
        results.append([int(add(np.arange(5))), sum(add.stats.cache_hits.values()), [*messages]])
    print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def used(filled, tmp_path_factory):
    """Return by (location, reason): the path that is not trusted, and the results of a process that uses the cache."""
    paths, caches = {}, {}
    for which, reason in [*UNTRUSTED, ("", "")]:
        cache = caches[which, reason] = tmp_path_factory.mktemp("ways") / "cache"
        shutil.copytree(filled, cache)
        [path] = cache.glob(which) if which else [cache]
        paths[which, reason] = path
        if reason == "another user's":
            if os.geteuid() == 0:
                os.chown(path, 65534, 65534)
        elif reason:
            path.chmod(path.stat().st_mode | (0o002 if reason == "writable for others" else 0o020))
    command = [sys.executable, "-c", textwrap.dedent(_USE_EACH), json.dumps([str(cache) for cache in caches.values()])]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, timeout=600)
    results = dict(zip(caches, json.loads(done.stdout), strict=True))
    assert results["", ""] == [10, 1, []]
    return {key: (paths[key], *results[key]) for key in UNTRUSTED}


@pytest.mark.long
@pytest.mark.parametrize(("which", "reason"), UNTRUSTED)
def test_code_that_others_can_have_written_is_not_loaded(which, reason, used):
    """Loading compiled code would run it."""
    if reason == "another user's" and os.geteuid() != 0:
        pytest.skip("only root can give files to other users")
    path, total, hits, messages = used[which, reason]
    assert (total, hits) == (10, 0)
    [text] = messages
    assert "the cache of compiled kernels is not used" in text
    assert f"{path} belongs to user id" in text
    assert f"Remove {path}, or set KEYTAIL_CACHE_DIR" in text


@pytest.mark.long
def test_a_link_in_the_cache_is_not_followed_but_replaced(filled, tmp_path):
    shutil.copytree(filled, tmp_path / "cache")
    [code] = tmp_path.glob("cache/*/*/a_kernel*.nbc")
    code.symlink_to(code.rename(tmp_path / "code"))
    results = [_run(_USE, KEYTAIL_CACHE_DIR=str(tmp_path / "cache")) for _ in range(2)]
    assert [result.stdout.split()[2] for result in results] == ["0", "1"]
    assert not code.is_symlink()


def _start(code: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait_until(is_so, process: subprocess.Popen) -> None:
    end = time.monotonic() + 600
    while not is_so():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def _has_open(process: subprocess.Popen, path: Path) -> bool:
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{process.pid}/fd"):
            with contextlib.suppress(OSError):  # already closed
                if os.readlink(entry.path) == str(path):
                    return True
    return False


@pytest.fixture
def while_another_compiles(filled, tmp_path):
    """Yield a cache without code, its held lock of `add`, and functions that save the code and free the lock."""
    cache = tmp_path / "cache"
    shutil.copytree(filled, cache)
    [lock] = cache.glob("*/*/a_kernel.add-*.lock")
    [index] = cache.glob("*/*/a_kernel.add-*.nbi")
    saved = index.rename(tmp_path / "index")
    with open(lock, "w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        yield cache, lock, lambda: shutil.copy(saved, index), file.close


@pytest.mark.long
def test_code_that_another_process_is_compiling_is_awaited_and_loaded(while_another_compiles):
    cache, lock, save, release = while_another_compiles
    with _start(_USE, KEYTAIL_CACHE_DIR=str(cache)) as process:
        _wait_until(lambda: _has_open(process, lock), process)
        save()
        release()
        output, _ = process.communicate(timeout=600)
    assert output.split()[1:] == ["10", "1"]


@pytest.mark.long
def test_a_process_that_ends_while_compiling_does_not_block_others(while_another_compiles):
    cache, lock, _, release = while_another_compiles
    with _start(_USE, KEYTAIL_CACHE_DIR=str(cache)) as process:
        _wait_until(lambda: _has_open(process, lock), process)
        release()
        output, _ = process.communicate(timeout=600)
    assert output.split()[1:] == ["10", "0"]
    assert _run(_USE, KEYTAIL_CACHE_DIR=str(cache)).stdout.split()[1:] == ["10", "1"]


@pytest.mark.long
def test_a_process_that_compiles_forever_is_awaited_once_and_with_a_limit(while_another_compiles):
    cache, *_ = while_another_compiles
    code = """
        from keytail.kernels import compile_lock
        compile_lock.MAX_WAIT_SECONDS = 0.2
    """
    again = """
        compile_lock.MAX_WAIT_SECONDS = 10**9
        print(int(add(np.arange(5, dtype=np.uint8))))
    """
    result = _run(textwrap.dedent(code) + textwrap.dedent(_USE) + textwrap.dedent(again), KEYTAIL_CACHE_DIR=str(cache))
    assert result.stdout.split()[1:] == ["10", "0", "10"], result.stderr


@pytest.mark.long
def test_a_lock_is_released_after_compiling_even_if_it_fails(tmp_path):
    code = """
        import os, numba
        try:
            add("no array")
        except numba.TypingError:
            print([os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if n != "0"
                   and os.path.exists(f"/proc/self/fd/{n}") and ".lock" in os.readlink(f"/proc/self/fd/{n}")])
    """
    result = _run(textwrap.dedent(_USE) + textwrap.dedent(code), KEYTAIL_CACHE_DIR=str(tmp_path))
    assert result.stdout.split()[1:] == ["10", "0", "[]"], result.stderr
    assert list(tmp_path.glob("*/*/a_kernel.add-*.lock"))


def test_two_processes_without_the_lock_never_confuse_the_code_of_two_signatures(tmp_path):
    """Each process reads the index before the other one replaces it; the one whose index is lost writes its code last.
    """
    mine, others = (jit._TrustedFiles(str(tmp_path), "kernel", "stamp") for _ in range(2))
    read, write, delayed = mine._load_index, others._save_data, []

    def read_while_the_other_writes():
        index = read()
        mine._load_index = read
        others.save("signature of others", b"code of others")
        return index

    others._save_data = lambda *file: delayed.append(file)
    mine._load_index = read_while_the_other_writes
    mine.save("my signature", b"my code")
    write(*delayed.pop())
    assert mine.load("my signature") == b"my code"
    assert mine.load("signature of others") is None, "its index is lost, so the kernel must be compiled again"


@pytest.mark.long
def test_the_cache_is_trusted_with_any_umask(tmp_path):
    code = "import os; os.umask(0o002)\n" + textwrap.dedent(_USE)
    results = [_run(code, KEYTAIL_CACHE_DIR=str(tmp_path / "home" / "cache")) for _ in range(2)]
    assert [result.stdout.split()[2] for result in results] == ["0", "1"]
    assert [result.stderr for result in results] == ["", ""]


def _allow(top, of_folders, of_files):
    for folder, _, names in os.walk(top):
        Path(folder).chmod(of_folders)
        for name in names:
            (Path(folder) / name).chmod(of_files)


@pytest.mark.long
def test_the_default_folder_is_in_the_home_of_the_user(tmp_path):
    result = _run(_USE, HOME=str(tmp_path), KEYTAIL_CACHE_DIR="", XDG_CACHE_HOME="")
    assert result.stdout.split()[0].startswith(f"{tmp_path}/.cache/keytail/"), result.stderr


def test_the_numba_settings_of_other_code_are_unchanged():
    assert numba.config.CACHE_DIR != jit.CACHE_FOLDER


def test_the_name_of_the_folder_changes_with_any_kernel_source(tmp_path, monkeypatch):
    before = jit._digest()
    assert jit._digest() == before
    (tmp_path / "some.py").write_text("x = 1\n")
    monkeypatch.setattr(jit.resources, "files", lambda package: tmp_path)
    item = jit._digest()
    (tmp_path / "some.py").write_text("x = 2\n")
    assert len({before, item, jit._digest()}) == 3
    monkeypatch.setattr(jit.native, "CHOICE", "another")
    assert jit._digest() not in {before, item}


def test_kernels_release_the_gil():
    a = np.ones(1_000_000)
    _spin(a[:1])

    def ticks_during_a_kernel():
        worker = threading.Thread(target=_spin, args=(a,))
        worker.start()
        ticks = 0
        while worker.is_alive():
            ticks += 1
            time.sleep(0.001)
        return ticks

    # On a busy machine this thread may have to wait for the other one in one try; if the GIL is not released, no try
    # has many ticks.
    assert any(ticks_during_a_kernel() > 5 for _ in range(20))


def test_division_by_zero_gives_infinity_as_in_c():
    assert np.isinf(_divide(1.0, 0.0))
