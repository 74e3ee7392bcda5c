"""Checks conf/Dockerfile without an engine: the files that it copies exist and are sent to the engine, and its own
steps run.

No image is built here. test_release.py runs more of its steps: it builds the wheel from only the files that the engine
receives, and installs it with the pinned versions.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import keytail
from tests.image import DOCKERFILE, ROOT, defaults, instructions, sent_to_the_engine, step, tracked


def test_only_the_sources_are_sent_to_the_engine() -> None:
    paths = tracked()
    wanted = {path for path in paths if path.startswith(("lib/", "conf/", "jobs/"))}
    assert set(sent_to_the_engine(paths)) == wanted | {"pyproject.toml", "README.md", "LICENSE"}
    also = ["dist/keytail-1-py3-none-any.whl", "dist/keytail-1.tar.gz", "lib/keytail/__pycache__/a.pyc", ".venv/x",
            "lib/keytail.egg-info/PKG-INFO", "dist/a/b.whl", "build/x", ".git/config"]  # fmt: skip
    assert sent_to_the_engine(also) == also[:1]


def test_copied_files_exist_and_are_sent_to_the_engine() -> None:
    paths, stages, copied = sent_to_the_engine(tracked()), set(), []
    for name, rest in instructions():
        if name == "FROM" and " AS " in rest:
            stages.add(rest.split(" AS ")[1])
        if name != "COPY":
            continue
        sources = rest.split()[:-1]
        if sources[0].startswith("--from="):
            assert sources[0].removeprefix("--from=") in stages
            continue
        copied += sources
    assert copied
    for source in copied:
        assert source == "." or any(path == source or path.startswith(f"{source}/") for path in paths), source


def test_jobs_and_settings_are_those_of_the_wheel() -> None:
    """test_release.py runs the step; the wheel has no links."""
    assert step("jobs-dir")


def test_all_arguments_except_the_version_have_a_default() -> None:
    declared = [rest.partition("=")[0] for name, rest in instructions() if name == "ARG"]
    assert len(declared) == len(set(declared))
    assert set(declared) - defaults().keys() == {"VERSION"}
    used = set(re.findall(r"\$\{([A-Z]+)\b", DOCKERFILE.read_text()))
    assert set(declared) <= used, "an argument has no effect"
    assert used - set(declared) == {"PATH"}
    assert keytail.__version__ not in re.sub(r"(?m)^#.*$", "", DOCKERFILE.read_text())


def test_the_extras_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert defaults()["EXTRAS"] == "all"
    assert "all" in project["optional-dependencies"]


def test_the_user_of_the_image_is_not_root() -> None:
    last = dict(instructions())
    assert last["USER"] == "${UID}:${GID}"
    assert int(defaults()["UID"]) > 0


@pytest.mark.long
@pytest.mark.parametrize("version", [keytail.__version__, "9.9", ""])
def test_a_version_other_than_that_of_the_wheel_ends_the_build(version: str, tmp_path: Path) -> None:
    done = run(step("keytail --version"), VERSION=version)
    assert (done.returncode == 0) == (version == keytail.__version__)
    assert version == keytail.__version__ or f"the wheel has keytail {keytail.__version__}" in done.stdout


@pytest.mark.long
def test_the_kernels_of_the_image_are_compiled_for_any_cpu_and_any_user(tmp_path: Path) -> None:
    """The step that compiles kernels is run with another folder, and with one kernel instead of all, which would take
    minutes.
    """
    [settings] = [rest for _, rest in instructions() if "NUMBA_CPU_NAME" in rest]
    variables = dict(re.findall(r"(\w+)=(\S*)", settings))
    assert variables["NUMBA_CPU_NAME"] == "${CPU}"
    cache = tmp_path / "kernels"
    variables |= {"NUMBA_CPU_NAME": defaults()["CPU"], "KEYTAIL_CACHE_DIR": str(cache)}
    command = step("keytail doctor --warm").replace("/opt/keytail/kernels", str(cache))
    command = command.replace("keytail doctor --warm", f"{sys.executable} -c '{_ONE_KERNEL}'")
    assert (done := run(command, **variables)).returncode == 0, done.stderr
    modes = {stat.S_IMODE(path.stat().st_mode) for path in cache.rglob("*")}
    assert modes == {0o755, 0o644}
    as_any_user = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    for path in (cache, *cache.rglob("*")):
        path.chmod(stat.S_IMODE(path.stat().st_mode) & 0o555)
    try:
        again = subprocess.run([*as_any_user, sys.executable, "-c", _ONE_KERNEL], env=os.environ | variables,
                               capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
    finally:
        for path in (cache, *cache.rglob("*")):
            path.chmod(0o755)
    assert (done.stdout, again.stdout) == ("0\n", "1\n"), again.stderr


_ONE_KERNEL = """
from keytail.kernels.fan_out import set_bits
import numpy as np
set_bits(np.zeros(1, np.int64), 0, np.zeros(1, np.uint8))
print(sum(set_bits.stats.cache_hits.values()))
"""


def run(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command with a shell, as an engine does, with the programs of this environment."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [shutil.which("sh") or "sh", "-c", command], env=os.environ | variables | {"PATH": path},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
