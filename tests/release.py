"""Makes the files of a release from a clean clone, and checks each of them: `make release`, `python -m tests.release`.

The version is that of lib/keytail/__init__.py, and its section of CHANGES.md becomes the notes. The sdist is built from
the tracked files alone, and the wheel from the sdist. The wheel is installed in a new environment, which compacts and
verifies the log dir of a broker. With docker, podman or buildah, the image is built and does the same. Nothing is
published, and nothing is tagged.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path

from packaging.metadata import Metadata
from packaging.utils import parse_sdist_filename, parse_wheel_filename

from keytail import __version__
from tests import golden

ROOT = Path(__file__).parents[1]
# Needed only for development.
NOT_RELEASED = (".ci/", ".gitignore")
_NOT_FOR_SPARK = ("Dockerfile", "constraints.txt", "constraints-airflow.txt", "install-bundle.sh")
NOT_IN_THE_WHEEL = {f"keytail/conf/{name}" for name in _NOT_FOR_SPARK}
ENGINES = ("docker", "podman", "buildah")
PIP = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_COMPILE": "1"}
_NAMED = 10


class Failed(Exception):
    """A step of the release failed, or a check found a problem."""


@dataclass(frozen=True)
class Built:
    wheel: Path
    sdist: Path


def run(command: Sequence[str | Path], cwd: Path, **more: str) -> str:
    """Run a command without the variables of an environment, and return its output. Raises Failed with all output."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=cwd, env=kept | more, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command))}: status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def notes(changes: str, version: str) -> str:
    """Return the section of a version in the text of CHANGES.md. Raises Failed if there is none, or it is empty."""
    heading = rf"^## {re.escape(version)}(?: \([^)\n]*\))?\n"
    found = re.search(heading + r"(.*?)(?=^## |\Z)", changes, re.MULTILINE | re.DOTALL)
    if found is None or not found[1].strip():
        raise Failed(f"CHANGES.md has no section `## {version}` with text: describe there what users can now do")
    return found[1].strip() + "\n"


def refuse_unsorted(section: str) -> None:
    """Raise Failed if a section with parts, one for each thing that users do, begins with lines outside of them."""
    if section.startswith("- ") and "\n### " in section:
        raise Failed("CHANGES.md: move the lines at the top of the version into its parts (`### ...`)")


def is_trial(changes: str, version: str) -> bool:
    """Return whether the section of the version is still marked as not released."""
    return f"## {version} (not released)" in changes.splitlines()


def refuse_unless_clean(root: Path, version: str) -> None:
    """Raise Failed unless `root` is a checkout whose files are all committed, and no other commit has the version."""
    changed = run(["git", "status", "--porcelain"], root).splitlines()
    if changed:
        more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
        raise Failed(f"files are not committed: commit or remove them first: {', '.join(changed[:_NAMED])}{more}")
    if run(["git", "tag", "--list", f"v{version}"], root).strip():
        tagged, head = (run(["git", "rev-list", "-1", name], root) for name in (f"v{version}", "HEAD"))
        if tagged != head:
            raise Failed(f"the tag v{version} is on another commit: raise the version in lib/keytail/__init__.py")


def copy_of(root: Path, names: Collection[str], into: Path) -> Path:
    """Copy the files of these names, so that a build leaves nothing in the tree and uses no untracked file of it."""
    for name in names:
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, into / name)
    return into


def build(source: Path, out: Path) -> Built:
    """Build the sdist of `source`, and from the sdist the wheel, into the folder `out`."""
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", out, "."], source)
    [wheel], [sdist] = out.glob("*.whl"), out.glob("*.tar.gz")
    return Built(wheel, sdist)


def problems_of_files(built: Built, tracked: Collection[str]) -> Iterator[str]:
    """Yield which files the wheel and the sdist lack, and which they should not have."""
    wanted = {name.removeprefix("lib/") for name in tracked if name.startswith("lib/")}
    wanted |= {f"keytail/{name}" for name in tracked if name.startswith(("jobs/", "conf/"))} - NOT_IN_THE_WHEEL
    with zipfile.ZipFile(built.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        if wheel.read("keytail/conf/log4j2.properties") != wheel.read("keytail/run/log4j2.properties"):
            yield "the two log4j2.properties of the wheel differ"
    yield from _differences("the wheel", wanted | {"keytail/py.typed"}, names)
    with tarfile.open(built.sdist) as sdist:
        names = {member.name.partition("/")[2] for member in sdist.getmembers()}
    # PKG-INFO is generated; the builder always adds .gitignore.
    wanted = {name for name in tracked if not name.startswith(NOT_RELEASED)}
    yield from _differences("the sdist", wanted, names - {"PKG-INFO", ".gitignore"})


def _differences(where: str, wanted: set[str], names: set[str]) -> Iterator[str]:
    if wanted - names:
        yield f"{where} lacks {', '.join(sorted(wanted - names)[:_NAMED])}"
    if names - wanted:
        yield f"{where} should not have {', '.join(sorted(names - wanted)[:_NAMED])}"


def problems_of_metadata(built: Built, version: str) -> Iterator[str]:
    """Yield what an index would reject, or show wrongly, in the metadata of both files, and their differences."""
    with zipfile.ZipFile(built.wheel) as wheel:
        [name] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        of_wheel = wheel.read(name)
        if not any(item.endswith("licenses/LICENSE") for item in wheel.namelist()):
            yield "the wheel has no license file"
    with tarfile.open(built.sdist) as sdist:
        [member] = [item for item in sdist.getmembers() if item.name.count("/") == 1 and item.name.endswith("PKG-INFO")]
        file = sdist.extractfile(member)
        assert file is not None
        of_sdist = file.read()
    if of_wheel != of_sdist:
        yield "the metadata of the wheel and of the sdist differ"
    try:
        facts = Metadata.from_email(of_wheel, validate=True)
    except Exception as problem:  # an ExceptionGroup of all errors
        parts = getattr(problem, "exceptions", (problem,))
        yield f"invalid metadata: {'; '.join(map(str, parts))}"
        return
    if str(facts.version) != version:
        yield f"the metadata has the version {facts.version}, not {version}"
    for path, (parsed_name, parsed_version, *_) in (
        (built.wheel, parse_wheel_filename(built.wheel.name)), (built.sdist, parse_sdist_filename(built.sdist.name)),
    ):  # fmt: skip
        if (parsed_name, parsed_version) != (facts.name, facts.version):
            yield f"{path.name} does not have the name and the version of its metadata"
    if facts.license_expression != "Apache-2.0":
        yield f"the license is {facts.license_expression}"
    if facts.description_content_type != "text/markdown" or not message_from_bytes(of_wheel).get_payload():
        yield "the description is not the README"


def environment(home: Path, wheel: Path) -> Path:
    """Create an environment that has only the wheel and its dependencies, in the pinned versions. Returns its `bin`."""
    run([sys.executable, "-m", "venv", home / "venv"], home)
    pinned = ROOT / "conf/constraints.txt"
    run([home / "venv/bin/pip", "install", "--no-compile", "-c", pinned, wheel], home, **PIP)
    run([home / "venv/bin/python", "-m", "pip", "check"], home)
    return home / "venv/bin"


def compact_golden(keytail: Sequence[str | Path], verify: Sequence[str | Path], folder: Path, **more: str) -> None:
    """Compact the log dir of a real broker with one command line, and verify it with another. Raises Failed."""
    golden.unpack(folder)
    flags = ["--config", folder / "server.properties", "--topic-list", "none,gzip", "--output", "json"]
    found = [row["status"] for row in json.loads(run([*keytail, *flags, "--execute"], folder, **more))]
    if found != ["compacted"] * 3:
        raise Failed(f"{keytail[0]}: the partitions of the golden log dir are {', '.join(found)}, not compacted")
    found = [row["status"] for row in json.loads(run([*verify, *flags], folder))]
    if set(found) != {"sound"}:
        raise Failed(f"{verify[0]}: the compacted partitions are {', '.join(found)}, not sound")


def engine() -> str | None:
    """Return the container engine that works here, or None: docker may be installed without a running daemon."""
    for name in (os.environ.get("ENGINE"), *ENGINES):
        if name and shutil.which(name):
            if subprocess.run([name, "info"], capture_output=True, check=False).returncode == 0:
                return name
    return None


def image(source: Path, version: str, folder: Path) -> str:
    """Build the image, and compact and verify the log dir of a broker with it, in `folder`.

    Returns a line about the image, or a loud one if no engine works here.
    """
    name = engine()
    if name is None:
        return (
            f"IMAGE: NOT BUILT, because none of {', '.join(ENGINES)} works here. To build it, run `make image` "
            "in this commit on a host with one of them"
        )
    run(["make", "image", f"ENGINE={name}"], source)
    with _keytail_of(name, f"keytail:{version}", folder) as keytail:
        if (printed := run([*keytail, "--version"], folder)) != f"keytail {version}\n":
            raise Failed(f"the image prints {printed!r}")
        compact_golden([*keytail, "compact"], [*keytail, "verify"], folder)
    return f"image: keytail:{version}, in the store of {name}"


@contextmanager
def _keytail_of(engine: str, image: str, folder: Path) -> Iterator[list[str]]:
    """Yield the command line that runs the image's keytail on `folder`, as the owner of the folder."""
    options = ["--user", f"{os.getuid()}:{os.getgid()}", "--volume", f"{folder}:{folder}"]
    if engine != "buildah":
        # Podman of another user than root maps that user to root of the container, and all other users to subordinate
        # uids, which may not write to the folder.
        if os.geteuid() and "podman" in run([engine, "--version"], folder):  # `docker` may be an alias of podman
            options += ["--userns", "keep-id"]
        yield [engine, "run", "--rm", *options, "--entrypoint", "keytail", image]
        return
    container = run([engine, "from", image], folder).strip()
    try:
        yield [engine, "run", *options, container, "--", "keytail"]
    finally:
        run([engine, "rm", container], folder)


def release(root: Path, out: Path, version: str = __version__) -> None:
    """Make and check all files of a release in the folder `out`. Raises Failed; `out` then has no file."""
    changes = (root / "CHANGES.md").read_text()
    section = notes(changes, version)
    if not is_trial(changes, version):
        refuse_unsorted(section)
    refuse_unless_clean(root, version)
    tracked = run(["git", "ls-files"], root).splitlines()
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="keytail-release-") as folder:
        work = Path(folder)
        source = copy_of(root, tracked, work / "source")
        _step("build the sdist, and from it the wheel")
        built = build(source, work / "built")
        _step("check their files and metadata")
        problems = [*problems_of_files(built, tracked), *problems_of_metadata(built, version)]
        if problems:
            raise Failed("\n".join(problems))
        _step("install the wheel in a new environment, compact and verify the log dir of a broker")
        (work / "clean").mkdir()
        command = environment(work / "clean", built.wheel) / "keytail"
        if (printed := run([command, "--version"], work)) != f"keytail {version}\n":
            raise Failed(f"the installed wheel prints {printed!r}")
        compact_golden([command, "compact"], [command, "verify"], work / "clean")
        _step("build the image, compact and verify the log dir of a broker with it")
        (work / "image").mkdir()
        about_image = image(source, version, work / "image")
        shutil.copytree(work / "built", out)
    (out / "NOTES.md").write_text(f"# keytail {version}\n\n{section}")
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(out.iterdir())]
    (out / "SHA256SUMS").write_text("".join(sums))
    print(f"\nkeytail {version} in {out}:\n{''.join(sums)}{about_image}", flush=True)
    if is_trial(changes, version):
        print(
            f"TRIAL: CHANGES.md marks {version} as not released. Before you publish, put the date in place of these "
            "words, commit, and run this again"
        )
    else:
        print(f"Next: git tag -a v{version}, and publish these files")


def _step(what: str) -> None:
    print(f"release: {what}", flush=True)


if __name__ == "__main__":
    try:
        release(ROOT, ROOT / "build" / f"release-{__version__}")
    except Failed as problem:
        sys.exit(f"release: {problem}")
