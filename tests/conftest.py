"""Fails any test in which a module of keytail other than log/fs.py changes something inside a log dir.

An audit hook receives every open for writing, rename, link, removal, truncation and creation of this process. It
checks the path only if the innermost frame of package keytail is not log/fs.py, and reports paths under a directory
that a test registered, or under pytest's temporary directory in or beside a partition directory that contains a log.
There is no way to opt out; processes that a test starts are not watched.
"""

from __future__ import annotations

import functools
import gc
import os
import random
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import pytest
import typer.testing
from hypothesis import settings

import keytail
from tests import class_archives
from tests.chance import SEED
from tests.command_line import log_dir, run  # noqa: F401
from tests.run.shared import end_shared_session, engine, on_spark, spark, two_workers  # noqa: F401

# The first call of a kernel compiles it, which takes seconds on a machine with a cold cache, and is not a failure.
settings.register_profile("keytail", deadline=None)
settings.load_profile("keytail")

# Processes that a shell starts in the background ignore SIGINT, and so would all processes that tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Typer's runner would build all commands again for each command line, which would take most of the time of a test.
typer.testing._get_command = functools.cache(typer.testing._get_command)  # type: ignore[attr-defined]

# Spark's workers import no module from the current directory, but run functions of the tests. With this variable, all
# JVMs find the tests, whichever test starts them.
ROOT = str(Path(__file__).resolve().parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
class_archives.use_for_spark()
IN_MEMORY = "/dev/shm"


# The files of `make check` that take longest, up to 30 s of CPU.
SLOW_FILES = {
    "tests/audit/test_missing_segments.py",
    "tests/audit/test_stages.py",
    "tests/cli/test_metadata.py",
    "tests/compact/proof/test_prove.py",
    "tests/documentation/test_help.py",
    "tests/ledger/test_without_spark.py",
    "tests/lookup/test_steps.py",
    "tests/main/test_recorded.py",
    "tests/test_extras.py",
}


def pytest_configure(config: pytest.Config) -> None:
    """Keep temporary files in memory for `make check`, until its end: thousands of small files are created and synced.
    `make test` uses a disk."""
    if os.environ.get("KEYTAIL_DRAWS") == "0" and not hasattr(config, "workerinput") and _has_room_in_memory():
        folder = tempfile.mkdtemp(prefix="keytail-check-", dir=IN_MEMORY)
        os.chmod(folder, 0o755)  # some tests run programs as other users
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        config.add_cleanup(functools.partial(shutil.rmtree, folder, ignore_errors=True))


def _has_room_in_memory() -> bool:
    """Return whether a file system in memory has 2 GiB free (a run needs 630 MB), and allows the execution of
    programs."""
    try:
        facts = os.statvfs(IN_MEMORY)
    except OSError:
        return False
    return facts.f_bavail * facts.f_frsize > 2 << 30 and not facts.f_flag & (os.ST_NOEXEC | os.ST_RDONLY)


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Disable garbage collection, because the thousands of tests remain until the end."""
    gc.disable()


@pytest.hookimpl(tryfirst=True)  # this must run before pytest-xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Make each file a group that runs in one process, because its tests share fixtures.

    The tests with the shared Spark session are two groups, because each process starts that session for itself. An
    xdist_group mark on a test replaces its group, so that tests of different files do not run at the same time. Groups
    that start JVMs run first, followed by files that take long, so that the cores finish at about the same time. Tests
    with the mark `soak`, and all but one of the tests that share a mark `one_of`, are left out, unless KEYTAIL_SOAK=1.
    With KEYTAIL_ONE_OF=all, all tests with the latter mark are kept.
    """
    if os.environ.get("KEYTAIL_SOAK") != "1":
        left_out = {item for item in items if item.get_closest_marker("soak")}
        # A test that is named on the command line is run.
        if os.environ.get("KEYTAIL_ONE_OF") != "all" and not any("::" in argument for argument in config.args):
            left_out |= _not_drawn(items, left_out)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    long = SLOW_FILES | {_file(item) for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: (_rank(item), _file(item) not in long))
    sharing = list(dict.fromkeys(_file(item) for item in items if _shares_spark(item)))
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            file = _file(item)
            group = f"a shared session, {sharing.index(file) % 2}" if _shares_spark(item) else file
            item.add_marker(pytest.mark.xdist_group(group))


def _not_drawn(items: list[pytest.Item], left_out: set[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that are left out because another test with the same mark `one_of` is run.

    A test is drawn first, and then one of its cases, so that a test with many cases is not drawn more often than
    others.
    """
    groups: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        if item not in left_out and (mark := item.get_closest_marker("one_of")):
            test = item.nodeid.partition("[")[0]
            groups.setdefault(mark.args[0] if mark.args else test, {}).setdefault(test, []).append(item)
    drawn = set()
    for name, tests in groups.items():
        rng = random.Random(f"{SEED} {name}")
        drawn.add(rng.choice(rng.choice(list(tests.values()))))
    return {item for tests in groups.values() for cases in tests.values() for item in cases} - drawn


def pytest_collection_finish(session: pytest.Session) -> None:
    """Fail if groups are ignored (pytest-xdist 3.8.0 under pytest 9.2): each process would create all fixtures."""
    gc.enable()
    gc.freeze()
    if hasattr(session.config, "workerinput") and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("pytest-xdist ignores groups with this pytest: install conf/constraints.txt")


def _file(item: pytest.Item) -> str:
    # `item.location` inspects the source of the test, which takes a second in total
    return item.nodeid.partition("::")[0]


def _rank(item: pytest.Item) -> int:
    if _shares_spark(item):
        return 0
    return 1 if item.get_closest_marker("spark") or item.get_closest_marker("interop") else 2


def _shares_spark(item: pytest.Item) -> bool:
    return "spark" in getattr(item, "fixturenames", ())


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("spark") and not _shares_spark(item):
        end_shared_session()


def pytest_sessionfinish() -> None:
    end_shared_session()


PACKAGE = os.path.dirname(os.path.realpath(keytail.__file__)) + os.sep
TESTS = os.path.dirname(os.path.realpath(__file__)) + os.sep
# `files/` implements the operations of fs.py, and only fs.py imports it (a contract of import-linter).
FILE_SYSTEM = (os.path.join(PACKAGE, "log", "fs.py"), os.path.join(PACKAGE, "log", "files", ""))
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

# For each event, the positions of the arguments that are changed paths.
CHANGING = {
    "open": (0,),
    "os.rename": (0, 1),
    "os.link": (0, 1),
    "os.symlink": (1,),
    "os.remove": (0,),
    "os.rmdir": (0,),
    "os.mkdir": (0,),
    "os.truncate": (0,),
    "os.utime": (0,),
    "os.chmod": (0,),
    "os.chown": (0,),
    "os.setxattr": (0,),
    "os.removexattr": (0,),
    "shutil.rmtree": (0,),
    "shutil.move": (0, 1),
    "shutil.copyfile": (1,),
}


class Watch:
    """The state of the audit hook. There is only one, because hooks cannot be removed."""

    def __init__(self) -> None:
        self.registered: set[str] = set()
        self.temporary = ""
        self.violations: list[str] = []
        self._is_checking = False

    def __call__(self, event: str, arguments: tuple) -> None:
        if event not in CHANGING or self._is_checking or not (self.registered or self.temporary):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & WRITING):
            return
        module = _module_of_keytail(sys._getframe(1))
        if module is None or module.startswith(FILE_SYSTEM):
            return
        before = len(self.violations)
        self._is_checking = True
        try:
            for position in CHANGING[event]:
                path = _path(arguments[position])
                if path is not None and self.is_in_a_log_dir(path):
                    self.violations.append(f"{module} did {event} on {path}; only log/fs.py may")
        finally:
            self._is_checking = False
        if len(self.violations) > before:
            raise AssertionError(self.violations[-1])

    def is_in_a_log_dir(self, path: str) -> bool:
        if any(path == root or path.startswith(root + os.sep) for root in self.registered):
            return True
        if not (self.temporary and path.startswith(self.temporary)):
            return False
        directory = os.path.dirname(path)
        return _is_partition_dir(directory) or _is_partition_dir(path) or _contains_partitions(directory)


def _module_of_keytail(frame: FrameType | None) -> str | None:
    """Return the innermost module of the package on the stack, or None if it called code of a test."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(TESTS):
            return None
        if frame.f_code.co_filename.startswith(PACKAGE):
            return frame.f_code.co_filename
        frame = frame.f_back
    return None


def _path(argument: object) -> str | None:
    """Return the absolute path; for a descriptor, the path of its file."""
    if isinstance(argument, int):
        try:
            return os.readlink(f"/proc/self/fd/{argument}")
        except OSError:
            return None
    if isinstance(argument, (str, bytes, os.PathLike)):
        return os.path.realpath(os.fsdecode(argument))
    return None


def _is_partition_dir(path: str) -> bool:
    stem, dash, number = os.path.basename(path).rpartition("-")
    if not (stem and dash and number.isdecimal()):
        return False
    try:
        return any(name.endswith((".log", ".log.swap")) for name in os.listdir(path))
    except OSError:
        return False


def _contains_partitions(path: str) -> bool:
    try:
        return any(_is_partition_dir(os.path.join(path, name)) for name in os.listdir(path))
    except OSError:
        return False


watch = Watch()
sys.addaudithook(watch)


@pytest.fixture(scope="session", autouse=True)
def _watched_temporary_dir(tmp_path_factory: pytest.TempPathFactory) -> None:
    watch.temporary = os.path.realpath(tmp_path_factory.getbasetemp()) + os.sep


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Return an empty directory. pytest's own fixture looks for a free number among the directories of all earlier
    tests, which takes longer the more there are.
    """
    name = re.sub(r"\W", "_", request.node.name)[:21]
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=tmp_path_factory.getbasetemp()))


@pytest.fixture
def register_log_dir() -> Iterator[Callable[[Path], None]]:
    """Register log dirs that are outside of `tmp_path`, or that do not have a partition yet."""
    before = set(watch.registered)
    yield lambda path: watch.registered.add(os.path.realpath(path))
    watch.registered = before


@pytest.fixture(autouse=True)
def only_fs_changes_log_dirs() -> Iterator[None]:
    """Fail the test if the hook's AssertionError was swallowed."""
    watch.violations.clear()
    yield
    violations, watch.violations = watch.violations, []
    assert not violations, "\n".join(violations)
