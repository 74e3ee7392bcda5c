"""Returns the metadata by which Airflow finds the provider (entry point `apache_airflow_provider`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def get_provider_info() -> dict[str, Any]:
    made: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("provider.yaml").read_text())
    return made
