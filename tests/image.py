"""Reads conf/Dockerfile and .dockerignore as a container engine does, as far as the files of the project require it."""

from __future__ import annotations

import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "conf" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """Return the name and arguments of each instruction, with continuation lines joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    whole = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in whole.splitlines())]


def sent_to_the_engine(paths: list[str]) -> list[str]:
    """Return the `paths` that .dockerignore does not exclude: the last line that matches a path or a parent decides."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]

    def matches(path: str, rule: str) -> bool:
        parts = path.split("/")
        above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
        if rule.startswith("**/"):
            return any(fnmatch(part, rule[3:]) for part in parts)
        return any(fnmatch(item, rule) and item.count("/") == rule.count("/") for item in above)

    def is_sent(path: str) -> bool:
        matching = [rule for rule in rules if matches(path, rule.removeprefix("!"))]
        return not matching or matching[-1].startswith("!")

    return [path for path in paths if is_sent(path)]


def defaults() -> dict[str, str]:
    found = [rest.partition("=") for name, rest in instructions() if name == "ARG"]
    return {name: value for name, equals, value in found if equals}


def step(*words: str) -> str:
    """Return the only RUN instruction that contains all `words`."""
    [rest] = [rest for name, rest in instructions() if name == "RUN" and all(word in rest for word in words)]
    return rest


def tracked() -> list[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so the tracked files are unknown")
    return subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
