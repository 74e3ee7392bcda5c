"""Builds the image of conf/Dockerfile with buildah, which needs no daemon, and compacts the log dir of a broker in it.

Registries of images may be unreachable, so the base is made from Debian's packages, and a stand-in takes the place of
Spark's start script. `make engine` installs what this needs.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import keytail
from tests import release
from tests.image import ROOT, tracked
from tests.release import copy_of, run

_MISSING = [name for name in ("buildah", "debootstrap") if not shutil.which(name)]
_TRUSTED = Path("/usr/local/share/ca-certificates")  # certificates that this host trusts in addition to Debian's


@pytest.mark.long
@pytest.mark.soak("test_image.py and test_release.py run the steps of the Dockerfile")
@pytest.mark.skipif(bool(_MISSING) or os.geteuid() != 0, reason="needs buildah and debootstrap, as root: make engine")
def test_the_image_is_built_and_compacts_the_log_dir_of_a_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = tmp_path / "storage.conf"
    storage.write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path}/images"\nrunroot = "{tmp_path}/running"\n'
    )
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(storage))
    monkeypatch.setenv("BUILDAH_ISOLATION", "chroot")
    monkeypatch.setenv("ENGINE", "buildah")
    monkeypatch.setenv("ARGS", "--build-arg BASE=localhost/base --build-arg SPARK=localhost/spark")
    _store("localhost/base", _debian(tmp_path / "debian"))
    script = tmp_path / "spark/opt/entrypoint.sh"
    script.parent.mkdir(parents=True)
    script.write_text('#!/bin/sh\nexec "$@"\n')
    script.chmod(0o755)
    _store("localhost/spark", tmp_path / "spark")
    source = copy_of(ROOT, tracked(), tmp_path / "source")
    (tmp_path / "image").mkdir()
    about = release.image(source, keytail.__version__, tmp_path / "image")
    assert about == f"image: keytail:{keytail.__version__}, in the store of buildah"


def _debian(root: Path) -> Path:
    """Install Debian 12 with Python into the directory `root`."""
    packages = "python3,python3-venv,ca-certificates"
    run(["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", root], root.parent)
    for path in _TRUSTED.glob("*.crt"):
        shutil.copy2(path, root / str(_TRUSTED)[1:])
    run(["chroot", root, "update-ca-certificates"], root)
    return root


def _store(image: str, root: Path) -> None:
    """Store a directory as an image."""
    container = run(["buildah", "from", "scratch"], root).strip()
    run(["buildah", "add", container, root, "/"], root)
    run(["buildah", "commit", container, image], root)
    run(["buildah", "rm", container], root)
