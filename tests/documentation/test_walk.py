"""The section on one batch in lib/keytail/README.md: every function that it names exists."""

from __future__ import annotations

import importlib
import pkgutil
import re
from types import ModuleType

import pytest

import keytail
from tests.documentation.pages import text_of

_PACKAGES = "|".join(item.name for item in pkgutil.iter_modules(keytail.__path__) if item.ispkg)
_SECTION = text_of("lib/keytail/README.md").partition("\n## One batch, from bytes to swap\n")[2].partition("\n## ")[0]
NAMED = sorted(set(re.findall(rf"`((?:{_PACKAGES})\.\w+\.[\w.]+)`", _SECTION)))


def test_the_section_exists() -> None:
    assert len(NAMED) > 35
    assert {name.partition(".")[0] for name in NAMED} >= {"compact", "log", "format", "kernels"}


@pytest.mark.parametrize("name", NAMED)
def test_the_named_functions_exist(name: str) -> None:
    found: object = keytail
    for part in name.split("."):
        if isinstance(found, ModuleType) and not hasattr(found, part):
            found = importlib.import_module(f"{found.__name__}.{part}")
        else:
            found = getattr(found, part)


def test_steps_are_numbered() -> None:
    steps = [int(number) for number in re.findall(r"^\| (\d+) \|", _SECTION, re.MULTILINE)]
    assert steps == list(range(1, len(steps) + 1))
