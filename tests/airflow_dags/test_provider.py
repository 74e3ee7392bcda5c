"""The provider as a package: its wheel, and what Airflow itself finds in it."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from keytail import __version__
from tests.airflow_dags.conftest import DAGS

pytestmark = pytest.mark.xdist_group("airflow")

# `airflow providers list` and its like print parts of this as tables.
ASK_AIRFLOW = """
import json, importlib.resources, jsonschema, warnings
from airflow.providers_manager import ProvidersManager
manager = ProvidersManager()
info, hook = manager.providers["airflow-provider-keytail"], manager.hooks["keytail"]
schema = json.loads(importlib.resources.files("airflow").joinpath("provider.yaml.schema.json").read_text())
data = {key: value for key, value in info.data.items() if key != "documentation-url"}  # Airflow has added it
modules = [name for kind in ("hooks", "operators") for one in data[kind] for name in one["python-modules"]]
for name in modules:
    importlib.import_module(name)
print("ANSWER", json.dumps({
    "version": info.version, "versions": data["versions"], "hook": hook._asdict(), "modules": modules,
    "errors": [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(data)],
}))
"""


@pytest.mark.long
def test_airflow_finds_the_provider_of_the_wheel(
    airflow_bin: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    """provider.yaml matches Airflow's schema, the type of Connection is known, and the examples are all DAG files."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=DAGS, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        archive.extractall(tmp_path / "site")
    package = {str(path.relative_to(DAGS)) for path in (DAGS / "keytail_provider").rglob("*.*")}
    examples = {f"keytail_provider/example_dags/{path.name}" for path in DAGS.glob("*.py")}
    assert names == {name for name in package if not name.endswith(".pyc")} | examples
    asked = subprocess.run(
        [airflow_bin / "python", "-c", ASK_AIRFLOW], env=environment | {"PYTHONPATH": str(tmp_path / "site")},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    answers = [line for line in asked.stdout.splitlines() if line.startswith("ANSWER ")]
    assert answers, asked.stdout + asked.stderr
    found = json.loads(answers[0].removeprefix("ANSWER "))
    assert found["errors"] == []
    assert [found["version"], *found["versions"][:1]] == [__version__, __version__]
    assert found["hook"]["hook_class_name"] == "keytail_provider.hooks.keytail.KeytailHook"
    assert found["hook"]["connection_id_attribute_name"] == "keytail_conn_id"
    assert {f"{name.replace('.', '/')}.py" for name in found["modules"]} == {
        name for name in package if name.startswith(("keytail_provider/hooks/k", "keytail_provider/operators/k"))
        and name.endswith(".py")
    }  # fmt: skip
