"""Files that cannot import the table of supported versions agree with it, and `make versions` tries these versions."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from keytail.versions import JAVAS, OLDEST_JAVA, PYTHONS, either, numbers
from tests import versions

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINNED = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "conf/constraints.txt").read_text(), re.MULTILINE))


def test_the_metadata_has_the_supported_versions_of_python() -> None:
    named = [line.split(" :: ")[-1] for line in PROJECT["project"]["classifiers"] if "Language :: Python ::" in line]
    assert tuple(named) == PYTHONS
    assert PROJECT["project"]["requires-python"] == f">={PYTHONS[0]}"
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{PYTHONS[0].replace('.', '')}"
    assert f"{sys.version_info[0]}.{sys.version_info[1]}" in PYTHONS, "the tests must run on a supported Python"


def test_all_packages_of_these_tests_are_pinned() -> None:
    """Indirect dependencies are pinned, too: an unpinned one could be installed in another version tomorrow."""
    pinned = {_as_pip_does(name): version for name, version in PINNED.items()}
    ours = {"keytail", "pip", "setuptools", "wheel"}
    installed = {_as_pip_does(item.name): item.version for item in metadata.distributions()}
    assert {name: version for name, version in installed.items() if name not in ours} == {
        name: version for name, version in pinned.items() if name in installed
    }


def _as_pip_does(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_version_parts_are_compared_as_numbers() -> None:
    assert sorted(PYTHONS, key=numbers) == list(PYTHONS)
    assert numbers("3.9") < numbers("3.11")
    assert all(numbers(first)[0] == release for release, first in JAVAS.items())
    assert either([17, 21, 25]) == "17, 21 or 25"
    assert either(["3.11"]) == "3.11"


@pytest.mark.parametrize("page", ["README.md", "lib/keytail/run/CLUSTER.md"])
def test_pages_have_the_supported_versions(page: str) -> None:
    text = " ".join((ROOT / page).read_text().split())
    assert re.findall(r"Python (3\.[\d., or]+\d)", text) == [either(PYTHONS)]
    assert re.findall(r"Java (\d\d, [\d., or]+\d)", text) == [either([*JAVAS])]


def test_the_image_has_supported_versions() -> None:
    text = (ROOT / "conf/Dockerfile").read_text()
    [python] = re.findall(r"^ARG BASE=\S*/python:(3\.\d+)-", text, re.MULTILINE)
    [java] = re.findall(r"^ARG JAVA=openjdk-(\d+)-", text, re.MULTILINE)
    [(spark, sparks_java)] = re.findall(r"^ARG SPARK=\S*/spark:([\d.]+)-scala[\d.]+-java(\d+)-", text, re.MULTILINE)
    assert python in PYTHONS
    assert int(java) == int(sparks_java) == OLDEST_JAVA
    assert spark == PINNED["pyspark"]
    assert f"pyspark=={spark}" in PROJECT["project"]["optional-dependencies"]["spark"]


def test_installed_versions_are_found(tmp_path: Path) -> None:
    """`make versions` finds this interpreter and Java, and ignores a command that only looks like a Python."""
    assert versions.version_of(sys.executable) == sys.version.split()[0]
    pretends = tmp_path / "python3.99"
    pretends.write_text("#!/bin/sh\necho 'python3.99: command not found' >&2\nexit 127\n")
    pretends.chmod(0o755)
    assert versions.version_of(str(pretends)) is None
    assert versions.version_of(str(tmp_path / "nothing")) is None
    found = dict(versions.javas_here())
    assert set(found) <= set(JAVAS)
    assert all((Path(home) / "bin/java").exists() for home in found.values())
