"""`make bundle` creates an archive from which keytail can be installed, and runs, without a network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import keytail
from tests import golden
from tests.image import ROOT, tracked

PYTHON = "{}.{}".format(*sys.version_info)


def offline(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a network namespace without a network, without settings of pip.

    If this user may not create one, only a proxy that does not exist keeps pip from the network.
    """
    alone = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        alone = ["env", "http_proxy=http://127.0.0.1:9", "https_proxy=http://127.0.0.1:9"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHONPATH"))}
    return subprocess.run([*alone, *command], cwd=cwd, env=kept, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a bundle that is made in a copy of the tree, with the environment of this test."""
    tree = tmp_path_factory.mktemp("tree")
    for name in tracked():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    (tree / "venv").mkdir()
    for stamp in (".commands", ".installed"):  # keep make from installing the copy into this environment
        (tree / "venv" / stamp).touch()
    make = ["make", "bundle", "VENV=venv", f"BIN={Path(sys.executable).parent}"]
    done = subprocess.run(make, cwd=tree, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    [archive] = tree.glob("build/*.tar")
    assert [path.name for path in tree.glob("build/*")] == [archive.name]
    assert archive.name.startswith(f"keytail-{keytail.__version__}-python{PYTHON}-linux-")
    with tarfile.open(archive) as tar:
        tar.extractall(tree / "unpacked", filter="data")
    return tree / "unpacked" / archive.stem


@pytest.mark.long
@pytest.mark.one_of("a wheel in an empty environment")
def test_a_bundle_is_installed_and_runs_without_a_network(unpacked: Path, tmp_path: Path) -> None:
    done = offline("sh", unpacked / "install.sh", tmp_path / "env", sys.executable, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    version, then = done.stdout.splitlines()
    assert version == f"keytail {keytail.__version__}"
    assert then.endswith(f" {tmp_path}/env/bin/keytail doctor --warm")
    [packages] = tmp_path.glob("env/lib/python*/site-packages")
    assert [*packages.glob("keytail/__pycache__/*.pyc")]
    assert not [*packages.glob("numba/tests/__pycache__")]
    golden.unpack(tmp_path)
    flags = ("--config", tmp_path / "server.properties", "--topic-list", "none,gzip", "--output", "json")
    done = offline(tmp_path / "env/bin/keytail", "compact", *flags, "--execute", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [row["status"] for row in json.loads(done.stdout)] == ["compacted"] * 3


@pytest.mark.long
def test_a_missing_python_or_one_of_another_version_is_refused(unpacked: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(unpacked, tmp_path / "bundle", ignore=shutil.ignore_patterns("wheels"))
    (copy / "python-version").write_text("3.99\n")
    done = offline("sh", copy / "install.sh", tmp_path / "env", sys.executable, cwd=tmp_path)
    assert (done.returncode, (tmp_path / "env").exists()) == (2, False)
    assert f"the bundle is for Python 3.99, and {sys.executable} is Python {PYTHON}" in done.stderr
    done = offline("sh", copy / "install.sh", tmp_path / "env", "nosuch-python", cwd=tmp_path)
    assert (done.returncode, (tmp_path / "env").exists()) == (2, False)
    assert "there is no nosuch-python here: give a Python 3.99 after DIR" in done.stderr
