"""The parts of `make soak` name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.soak import parts

ROOT = Path(__file__).parents[1]
NEED_A_JVM = {"bench", "interop", "versions_of_kafka"}


def test_every_path_of_a_part_exists() -> None:
    paths = {word for part in parts() for word in part.command if word.startswith("tests/")}
    assert "tests/kills/test_forked.py" in paths
    assert {path for path in paths if not (ROOT / path).exists()} == set()


def test_the_soak_part_named_draws_has_all_folders_with_random_cases_without_a_jvm() -> None:
    [command] = [part.command for part in parts() if part.name == "draws"]
    imported = re.compile(r"^from tests\.chance import .*\bdraws\b", re.MULTILINE)
    files = (file for file in (ROOT / "tests").rglob("test_*.py") if imported.search(file.read_text()))
    found = {file.relative_to(ROOT / "tests").parts[0] for file in files}
    assert {word.removeprefix("tests/") for word in command if word.startswith("tests/")} == found - NEED_A_JVM
