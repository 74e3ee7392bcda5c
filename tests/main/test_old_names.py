"""Module names from the pages of earlier versions still work."""

from __future__ import annotations

import subprocess
import sys

import pytest

from keytail import __version__


@pytest.mark.parametrize("module", ["keytail", "keytail.app.cli"])
def test_modules_of_the_command_line_can_be_run(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["keytail", __version__]


def test_the_module_that_downloads_jars_can_be_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "keytail.spark.delta_jars"], capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "fetch() missing 1 required positional argument" in done.stderr


def test_the_old_module_of_the_data_source_has_the_same_objects() -> None:
    from keytail.source import data_source
    from keytail.spark import source

    assert source.register is data_source.register
    assert source.KafkaLogSource is data_source.KafkaLogSource
