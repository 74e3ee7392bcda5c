"""The access rights of each thread of a process that root started while it works as another user."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.owned import BROKER, ROOT_ONLY, ids_as, ids_of, open_directory, private_directory, python

pytestmark = ROOT_ONLY

BEGIN = """
import ctypes, importlib, json, os, signal, sys, threading
from pathlib import Path
from keytail import acting_user
from keytail.acting_user import User, as_caller
private = Path(sys.argv[1])
user = User(int(sys.argv[2]), int(sys.argv[2]), (int(sys.argv[2]),))
def can_read():
    try:
        return (private / "secret").read_text()
    except PermissionError:
        return None
def status():
    return Path("/proc/thread-self/status").read_text()
"""


@pytest.fixture
def private(tmp_path: Path) -> Iterator[Path]:
    with open_directory() as path:
        directory = private_directory(path / "private")
        (directory / "secret").write_text("known to root")
        yield directory


def run(script: str, private: Path) -> object:
    return python(BEGIN + script, private, str(BROKER))


def test_the_process_has_the_ids_of_the_user_and_can_restore_those_of_root(private: Path) -> None:
    before, during, after = run(
        """
seen = [status()]
acting_user.become(user)
seen.append(status())
acting_user.give_back()
print(json.dumps([*seen, status()]))
""",
        private,
    )
    assert ids_of(during) == ids_as(BROKER)
    assert ids_of(after) == ids_of(before) != ids_of(during)


def test_only_the_requesting_thread_has_the_rights_of_the_caller(private: Path) -> None:
    reported = run(
        """
acting_user.become(user)
begun, over, found = threading.Event(), threading.Event(), {}
def caller():
    with as_caller():
        with as_caller():
            pass
        found["caller"] = can_read()
        begun.set()
        over.wait()
    found["caller later"] = can_read()
def other():
    begun.wait()
    found["other"] = can_read()
    over.set()
threads = [threading.Thread(target=one) for one in (caller, other)]
found["main"] = can_read()
[one.start() for one in threads]
begun.wait()
found["main meanwhile"] = can_read()
[one.join() for one in threads]
print(json.dumps(found))
""",
        private,
    )
    nobody = {"main": None, "main meanwhile": None, "other": None, "caller later": None}
    assert reported == {**nobody, "caller": "known to root"}


def test_after_an_error_the_rights_of_the_caller_are_dropped_again(private: Path) -> None:
    reported = run(
        """
acting_user.become(user)
try:
    with as_caller():
        raise KeyboardInterrupt
except KeyboardInterrupt:
    print(json.dumps([can_read(), status()]))
""",
        private,
    )
    assert reported[0] is None
    assert ids_of(reported[1]) == ids_as(BROKER)


def test_modules_are_loaded_from_directories_that_only_root_can_read(private: Path) -> None:
    package = private / "lazily"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name in ("one", "two", "three"):
        (package / f"{name}.py").write_text(f"name = {name!r}")
    reported = run(
        """
sys.path.append(str(private))
acting_user.become(user)
import lazily.one
from lazily import two
three = importlib.import_module("lazily.three")
print(json.dumps([lazily.one.name, two.name, three.name, can_read()]))
""",
        private,
    )
    assert reported == ["one", "two", "three", None]


def test_the_signal_at_the_death_of_the_parent_remains_set(private: Path) -> None:
    reported = run(
        """
libc = ctypes.CDLL(None)
def armed():
    number = ctypes.c_int()
    libc.prctl(2, ctypes.byref(number))
    return number.value
libc.prctl(1, int(signal.SIGUSR1))
found = [armed()]
acting_user.become(user)
found.append(armed())
with as_caller():
    found.append(armed())
found.append(armed())
acting_user.give_back()
print(json.dumps([*found, armed(), int(signal.SIGUSR1)]))
""",
        private,
    )
    assert len(set(reported)) == 1
    assert reported[0] != 0


def test_a_program_that_is_started_runs_as_the_caller(private: Path) -> None:
    reported = run(
        """
acting_user.become(user)
def ids(popen):
    return popen(["/bin/cat", "/proc/self/status"], stdout=-1).communicate()[0].decode()
import subprocess
print(json.dumps([ids(acting_user.popen_as_caller), status()]))
""",
        private,
    )
    assert ids_of(reported[0])["Uid"] == [0, 0, 0, 0]
    assert BROKER not in ids_of(reported[0])["Groups"]
    assert ids_of(reported[1]) == ids_as(BROKER)


@pytest.mark.long
def test_kernels_are_compiled_into_the_cache_of_the_caller_and_loaded_from_it(private: Path) -> None:
    script = """
os.environ["KEYTAIL_CACHE_DIR"] = str(private / "cache")
acting_user.become(user)
import numpy as np
from keytail.kernels import jit, murmur2
murmur2.partition_of_keys(np.zeros(3, np.uint8), np.array([0, 3]), np.zeros(1, bool), 4)
hits = sum(sum(one.stats.cache_hits.values()) for one in jit.KERNELS)
print(json.dumps([hits, sum(sum(one.stats.cache_misses.values()) for one in jit.KERNELS)]))
"""
    hits, misses = run(script, private)
    assert hits == 0 < misses
    assert {item.stat().st_uid for item in (private / "cache").rglob("*")} == {0}
    assert run(script, private) == [misses, 0]


def test_if_the_user_cannot_be_changed_the_ids_are_unchanged(private: Path) -> None:
    reported = run(
        """
before = status()
try:
    acting_user.become(User(2**32 - 1, 5, (5,)))
except OSError:
    print(json.dumps([before, status(), acting_user.works_as_another_user()]))
""",
        private,
    )
    assert ids_of(reported[0]) == ids_of(reported[1])
    assert reported[2] is False
