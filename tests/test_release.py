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
from pathlib import Path

import pytest

import keytail
from tests import release
from tests.image import sent_to_the_engine, step, tracked
from tests.release import PIP, ROOT, Built, Failed, build, compact_golden, copy_of, environment, run

VERIFY = [sys.executable, "-m", "keytail", "verify"]
_OF_VENV = ("pip", "setuptools", "pkg_resources", "_distutils_hack", "distutils-precedence")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(copy_of(ROOT, tracked(), tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def clean(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the `bin` of an environment that has only the wheel and its dependencies."""
    return environment(tmp_path_factory.mktemp("clean"), built.wheel)


@pytest.fixture(scope="module")
def with_spark(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the `bin` of an environment that has the wheel with its extra for Spark, made by the image's step."""
    home = tmp_path_factory.mktemp("with_spark")
    for source, folder in ((built.wheel, home / "wheel"), (ROOT / "conf/constraints.txt", home / "conf")):
        folder.mkdir()
        shutil.copy(source, folder)
    _as_in_the_image(home, "pip install", EXTRAS="spark")
    run([home / "venv/bin/python", "-m", "pip", "check"], home)
    return home / "venv/bin"


def _as_in_the_image(home: Path, *words: str, **arguments: str) -> None:
    """Run one step of conf/Dockerfile with `home` in place of the image's folders."""
    command = step(*words).replace("python3 -m venv", f"{sys.executable} -m venv").replace("--no-cache-dir ", "")
    for folder, here in (("/opt/keytail", home), ("/opt/spark", home / "spark"), ("/build", home / "build"),
                         ("/wheel ", f"{home}/wheel ")):  # fmt: skip
        command = re.sub(rf"(?<![\w/]){folder}", str(here), command)
    path = f"{home}/venv/bin:{os.environ['PATH']}"
    run(["sh", "-c", command], home, PATH=path, **PIP, **arguments)


@pytest.mark.soak("test_image.py: the files of the image; the environment here is made by the image's step")
def test_the_wheel_of_the_image_equals_the_built_one(built: Built, tmp_path: Path) -> None:
    """The wheel that the image's step makes from the files that an engine receives equals the built one."""
    source = copy_of(ROOT, sent_to_the_engine(tracked()), tmp_path / "src")
    _as_in_the_image(tmp_path, "pip wheel", KEYTAIL=str(source))
    [wheel] = tmp_path.glob("wheel/*")
    assert wheel.name == built.wheel.name
    with zipfile.ZipFile(wheel) as item, zipfile.ZipFile(built.wheel) as other:
        assert sorted(item.namelist()) == sorted(other.namelist())
        assert all(item.read(name) == other.read(name) for name in item.namelist())


@pytest.mark.long
def test_the_wheel_and_the_sdist_have_all_files_and_valid_metadata(built: Built) -> None:
    assert [*release.problems_of_files(built, tracked())] == []
    assert [*release.problems_of_metadata(built, keytail.__version__)] == []
    with zipfile.ZipFile(built.wheel) as wheel:
        assert "keytail/py.typed" in wheel.namelist()


@pytest.mark.long
def test_wrong_files_and_metadata_are_found(built: Built, tmp_path: Path) -> None:
    wheel = tmp_path / built.wheel.name.replace(keytail.__version__, "9.9")
    with zipfile.ZipFile(built.wheel) as source, zipfile.ZipFile(wheel, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name.endswith("METADATA"):
                data = data.replace(b"License-Expression: Apache-2.0", b"License-Expression: of its own")
            if name not in ("keytail/py.typed", "keytail/guide/flags.md"):
                target.writestr(name, data)
        target.writestr("keytail/secret.pem", "")
    sdist = tmp_path / built.sdist.name
    with tarfile.open(built.sdist) as source_tar, tarfile.open(sdist, "w:gz") as target_tar:
        for member in source_tar.getmembers():
            if not member.name.endswith("/Makefile"):
                target_tar.addfile(member, source_tar.extractfile(member) if member.isfile() else None)
    changed = Built(wheel, sdist)
    assert [*release.problems_of_files(changed, tracked())] == [
        "the wheel lacks keytail/guide/flags.md, keytail/py.typed",
        "the wheel should not have keytail/secret.pem",
        "the sdist lacks Makefile",
    ]
    differ, invalid = release.problems_of_metadata(changed, keytail.__version__)
    assert differ == "the metadata of the wheel and of the sdist differ"
    assert invalid.startswith("invalid metadata: ")
    assert "'of its own'" in invalid
    renamed = Built(built.wheel.rename(wheel), built.sdist)
    try:
        [problem] = release.problems_of_metadata(renamed, keytail.__version__)
    finally:
        wheel.rename(built.wheel)
    assert problem == f"{wheel.name} does not have the name and the version of its metadata"


CHANGES = "# Changes\n\n## 7.2.0 (not released)\n\n- two\n\n## 7.1.0 (2026-01-31)\n\n- one\n\n## 7.0.1\n"


def test_the_notes_are_the_section_of_the_version() -> None:
    assert (release.notes(CHANGES, "7.2.0"), release.notes(CHANGES, "7.1.0")) == ("- two\n", "- one\n")
    assert (release.is_trial(CHANGES, "7.2.0"), release.is_trial(CHANGES, "7.1.0")) == (True, False)
    for version in ("7.3.0", "7.1", "7.0.1"):  # the last has no text
        with pytest.raises(Failed, match=f"no section `## {version}` with text"):
            release.notes(CHANGES, version)
    release.refuse_unsorted("- one\n")
    release.refuse_unsorted("### Compact\n\n- one\n")
    with pytest.raises(Failed, match="move the lines at the top"):
        release.refuse_unsorted("- two\n\n### Compact\n\n- one\n")
    assert release.notes((ROOT / "CHANGES.md").read_text(), keytail.__version__)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "CHANGES.md").write_text(CHANGES)
    run(["git", "init", "--quiet"], root)
    _commit(root)
    return root


def _commit(root: Path) -> None:
    name = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    run(["git", "add", "--all"], root)
    run(["git", *name, "commit", "--quiet", "--allow-empty", "--message", "Add files"], root)


def test_a_tree_that_is_not_clean_is_refused(checkout: Path) -> None:
    release.refuse_unless_clean(checkout, "7.1.0")
    (checkout / "new").touch()
    with pytest.raises(Failed, match=r"not committed.*\?\? new"):
        release.release(checkout, checkout / "build", "7.1.0")
    (checkout / "new").unlink()
    (checkout / "CHANGES.md").write_text(CHANGES + "more\n")
    with pytest.raises(Failed, match=r"not committed.* M CHANGES.md"):
        release.release(checkout, checkout / "build", "7.1.0")
    assert not (checkout / "build").exists()


def test_a_version_without_changes_is_refused(checkout: Path) -> None:
    with pytest.raises(Failed, match=r"no section `## 7\.3\.0`"):
        release.release(checkout, checkout / "build", "7.3.0")


def test_a_version_that_was_released_from_another_commit_is_refused(checkout: Path) -> None:
    run(["git", "tag", "v7.1.0"], checkout)
    release.refuse_unless_clean(checkout, "7.1.0")
    _commit(checkout)
    with pytest.raises(Failed, match=r"v7\.1\.0 is on another commit"):
        release.release(checkout, checkout / "build", "7.1.0")


def test_a_missing_engine_is_reported_loudly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("ENGINE", raising=False)
    assert release.image(tmp_path, "1", tmp_path).startswith("IMAGE: NOT BUILT")
    for name, status in (("docker", 1), ("podman", 0), ("buildah", 0)):  # a client without a daemon, and two engines
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    assert release.engine() == "podman"
    monkeypatch.setenv("ENGINE", "buildah")
    assert release.engine() == "buildah"


@pytest.mark.parametrize(("uid", "printed", "keeps_id"), [(1000, "podman version 5.4.2", True),
                         (0, "podman version 5.4.2", False), (1000, "Docker version 28.0.1", False)])  # fmt: skip
def test_podman_of_a_user_runs_the_image_as_this_user(
    uid: int, printed: str, keeps_id: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docker").write_text(f"#!/bin/sh\necho {printed}\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(release.os, "geteuid", lambda: uid)
    with release._keytail_of("docker", "keytail:1", tmp_path) as command:
        assert ("--userns" in command) == keeps_id
        assert command[-3:] == ["--entrypoint", "keytail", "keytail:1"]


@pytest.mark.long
@pytest.mark.soak("each of its steps: the other tests of this file")
def test_a_release_has_all_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = copy_of(ROOT, tracked(), tmp_path / "clone")
    run(["git", "init", "--quiet"], root)
    _commit(root)
    monkeypatch.setattr(release, "engine", lambda: None)
    release.release(root, root / "build/release")
    version = keytail.__version__
    files = {f"keytail-{version}-py3-none-any.whl", f"keytail-{version}.tar.gz", "NOTES.md", "SHA256SUMS"}
    assert {path.name for path in root.glob("build/release/*")} == files
    run(["sha256sum", "--check", "--strict", "SHA256SUMS"], root / "build/release")
    assert "IMAGE: NOT BUILT" in capsys.readouterr().out
    assert run(["git", "status", "--porcelain"], root) == ""


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
    assert run([clean / "keytail", "--version"], tmp_path) == f"keytail {keytail.__version__}\n"
    compact_golden([clean / "keytail", "compact"], VERIFY, tmp_path)
    checks = json.loads(run([clean / "keytail", "doctor", "--output", "json"], tmp_path))
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
    [spark] = with_spark.parent.glob("lib/python*/site-packages/pyspark")
    command = [with_spark / "spark-submit", "--master", "local[2]", home / "jobs/compact.py"]
    compact_golden(command, VERIFY, tmp_path, SPARK_HOME=str(spark), SPARK_CONF_DIR=str(home / "conf"))


@pytest.mark.long
@pytest.mark.soak("the wheel has py.typed: test_the_wheel_and_the_sdist_have_all_files_and_valid_metadata")
def test_users_of_the_package_see_its_types(clean: Path, tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text("from keytail import __version__\n\nnumber: int = __version__\n")
    mypy = [sys.executable, "-m", "mypy", "--python-executable", clean / "python", "--cache-dir", tmp_path / "cache"]
    done = subprocess.run([*mypy, "user.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert 'expression has type "str", variable has type "int"' in done.stdout
