"""The released files: a complete wheel, and an sdist of the tracked files, which can be installed in an empty
environment.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path

import pytest

import keytail
from tests import golden
from tests.image import sent_to_the_engine, step, tracked

ROOT = Path(__file__).parents[1]
# Files that are needed only for development.
NOT_RELEASED = (".ci/", ".gitignore")
_PIP = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_COMPILE": "1"}
_OF_VENV = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence")
_NOT_FOR_SPARK = ("Dockerfile", "constraints.txt", "constraints-airflow.txt", "install-bundle.sh")
NOT_IN_THE_WHEEL = {f"keytail/conf/{name}" for name in _NOT_FOR_SPARK}


@dataclass(frozen=True)
class Built:
    wheel: Path
    sdist: Path


def _run(command: Sequence[str | Path], cwd: Path, **more: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=cwd, env=kept | more, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build the released files from a copy of the tree: a build must leave nothing in the tree, and must not use its
    untracked files."""
    source = tmp_path_factory.mktemp("source")
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("built")
    _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", out, "."], source)
    [wheel], [sdist] = out.glob("*.whl"), out.glob("*.tar.gz")
    return Built(wheel, sdist)


@pytest.fixture(scope="module")
def clean(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the `bin` of an environment that has only the wheel and its dependencies."""
    return _installed(built, tmp_path_factory.mktemp("clean"), extras="")


@pytest.fixture(scope="module")
def with_spark(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the `bin` of an environment that has the wheel with its extra for Spark."""
    return _installed(built, tmp_path_factory.mktemp("with_spark"), extras="spark")


def _installed(built: Built, home: Path, extras: str) -> Path:
    for source, folder in ((built.wheel, home / "wheel"), (ROOT / "conf/constraints.txt", home / "conf")):
        folder.mkdir()
        shutil.copy(source, folder)
    if not extras:  # the step of the image also links to Spark
        _run([sys.executable, "-m", "venv", home / "venv"], home)
        install = [home / "venv/bin/pip", "install", "--no-compile", "-c", home / "conf/constraints.txt", built.wheel]
        _run(install, home, **_PIP)
    else:
        _as_in_the_image(home, "pip install", EXTRAS=extras)
    _run([home / "venv/bin/python", "-m", "pip", "check"], home)
    return home / "venv/bin"


def _as_in_the_image(home: Path, *words: str, **arguments: str) -> None:
    """Run one step of conf/Dockerfile with `home` in place of the image's folders."""
    command = step(*words).replace("python3 -m venv", f"{sys.executable} -m venv").replace("--no-cache-dir ", "")
    for folder, here in (("/opt/keytail", home), ("/opt/spark", home / "spark"), ("/build", home / "build"),
                         ("/wheel ", f"{home}/wheel ")):  # fmt: skip
        command = re.sub(rf"(?<![\w/]){folder}", str(here), command)
    path = f"{home}/venv/bin:{os.environ['PATH']}"
    _run(["sh", "-c", command], home, PATH=path, **_PIP, **arguments)


@pytest.mark.soak("test_image.py: the files of the image; the environment here is made by the image's step")
def test_the_wheel_of_the_image_equals_the_built_one(built: Built, tmp_path: Path) -> None:
    """The wheel that the image's step makes from the files that an engine receives equals the built one."""
    for name in sent_to_the_engine(tracked()):
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / "src" / name)
    _as_in_the_image(tmp_path, "pip wheel", KEYTAIL=str(tmp_path / "src"))
    [wheel] = tmp_path.glob("wheel/*")
    assert wheel.name == built.wheel.name
    with zipfile.ZipFile(wheel) as item, zipfile.ZipFile(built.wheel) as other:
        assert sorted(item.namelist()) == sorted(other.namelist())
        assert all(item.read(name) == other.read(name) for name in item.namelist())


@pytest.mark.long
def test_the_wheel_has_the_packages_with_their_pages_and_types(built: Built) -> None:
    wanted = {name.removeprefix("lib/") for name in tracked() if name.startswith("lib/")}
    wanted |= {f"keytail/{name}" for name in tracked() if name.startswith(("jobs/", "conf/"))} - NOT_IN_THE_WHEEL
    with zipfile.ZipFile(built.wheel) as wheel:
        names = set(wheel.namelist())
        [metadata] = [name for name in names if name.endswith(".dist-info/METADATA")]
        facts = message_from_bytes(wheel.read(metadata))
        assert wheel.read("keytail/conf/log4j2.properties") == wheel.read("keytail/run/log4j2.properties")
    assert wanted <= names
    assert "keytail/py.typed" in names
    assert {name.split("/")[0] for name in names - wanted} == {metadata.split("/")[0]}
    assert facts["Version"] == keytail.__version__
    assert facts["License-Expression"] == "Apache-2.0"
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.long
def test_the_sdist_has_all_tracked_files(built: Built) -> None:
    with tarfile.open(built.sdist) as sdist:
        names = {member.name.partition("/")[2] for member in sdist.getmembers()}
    wanted = {name for name in tracked() if not name.startswith(NOT_RELEASED)}
    assert wanted <= names
    assert names - wanted <= {"PKG-INFO", ".gitignore"}  # PKG-INFO is generated; the builder always adds .gitignore


def test_the_version_is_defined_once() -> None:
    places = [
        name for name in tracked()
        if name.endswith((".py", ".toml")) and f'"{keytail.__version__}"' in (ROOT / name).read_text()
    ]  # fmt: skip
    assert places == ["lib/keytail/__init__.py"]
    assert f"## {keytail.__version__}" in (ROOT / "CHANGES.md").read_text()


@pytest.mark.long
@pytest.mark.one_of("a wheel in an empty environment")
def test_the_core_alone_compacts_the_log_dir_of_a_broker(clean: Path, tmp_path: Path) -> None:
    """The run uses no Spark, and less than 350 MB of packages; `verify` of this environment checks the result."""
    assert _run([clean / "keytail", "--version"], tmp_path) == f"keytail {keytail.__version__}\n"
    golden.unpack(tmp_path)
    flags = ["--config", tmp_path / "server.properties", "--topic-list", "none,gzip", "--output", "json"]
    rows = json.loads(_run([clean / "keytail", "compact", *flags, "--execute"], tmp_path))
    assert [row["status"] for row in rows] == ["compacted"] * 3
    verify = [sys.executable, "-m", "keytail", "verify"]
    assert {row["status"] for row in json.loads(_run([*verify, *flags], tmp_path))} == {"sound"}
    checks = json.loads(_run([clean / "keytail", "doctor", "--output", "json"], tmp_path))
    assert ["pip install 'keytail[spark]'" in row["found"] for row in checks if row["check"] == "Spark"] == [True]
    [packages] = clean.parent.glob("lib/python*/site-packages")
    brought = [path for path in packages.iterdir() if not path.name.startswith(_OF_VENV)]
    files = [file for path in brought for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 350_000_000


@pytest.mark.long
@pytest.mark.one_of("a wheel in an empty environment")
def test_a_job_of_the_wheel_compacts_the_log_dir_of_a_broker(with_spark: Path, tmp_path: Path) -> None:
    """The job runs under spark-submit, as in the image; `verify` of this environment checks the result."""
    home = with_spark.parents[1]
    _as_in_the_image(home, "jobs-dir")
    golden.unpack(tmp_path)
    flags = ["--config", tmp_path / "server.properties", "--topic-list", "none,gzip", "--output", "json"]
    [spark] = with_spark.parent.glob("lib/python*/site-packages/pyspark")
    command = [with_spark / "spark-submit", "--master", "local[2]", home / "jobs/compact.py", *flags, "--execute"]
    rows = json.loads(_run(command, tmp_path, SPARK_HOME=str(spark), SPARK_CONF_DIR=str(home / "conf")))
    assert [row["status"] for row in rows] == ["compacted"] * 3
    verify = [sys.executable, "-m", "keytail", "verify"]
    assert {row["status"] for row in json.loads(_run([*verify, *flags], tmp_path))} == {"sound"}


@pytest.mark.long
@pytest.mark.soak("the wheel has py.typed: test_the_wheel_has_the_packages_with_their_pages_and_types")
def test_users_of_the_package_see_its_types(clean: Path, tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text("from keytail import __version__\n\nnumber: int = __version__\n")
    mypy = [sys.executable, "-m", "mypy", "--python-executable", clean / "python", "--cache-dir", tmp_path / "cache"]
    done = subprocess.run([*mypy, "user.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 'expression has type "str", variable has type "int"' in done.stdout
