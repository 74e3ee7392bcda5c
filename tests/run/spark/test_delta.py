"""Requirements of sessions with Delta: the places of jars, the error if they are missing, and the shipped
configuration.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keytail.doctor.command import CheckRow
from keytail.doctor.machine import delta
from keytail.errors import KeytailError, UsageProblem
from keytail.run.spark.delta import (
    IVY_NOISE,
    LOCK,
    SETTINGS,
    alone,
    coordinates,
    in_sparks_jars,
    jars_problem,
    require_delta,
    session_settings,
)
from keytail.run.spark.stores import connector_for

CONF = Path(__file__).parents[3] / "conf" / "spark-delta.conf"


def test_the_shipped_conf_names_the_installed_delta_and_its_settings() -> None:
    lines = [line.split() for line in CONF.read_text().splitlines() if line and not line.startswith("#")]
    conf = {line[0]: line[1] for line in lines}
    assert all(len(line) == 2 for line in lines)
    ledger = conf.pop("spark.keytail.ledger")
    assert ledger.startswith("file:///")
    assert conf == {"spark.jars.packages": coordinates(), **SETTINGS, **connector_for("s3a://b").settings}


def test_jars_of_a_configured_folder_are_used(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match=r"has no \*delta-spark_\*\.jar") as reported:
        session_settings(str(tmp_path))
    assert coordinates() in str(reported.value)
    (tmp_path / "delta-spark_4.2_2.13-4.4.0.jar").touch()
    with pytest.raises(UsageProblem, match="delta-storage"):
        session_settings(str(tmp_path))
    (tmp_path / "io.delta_delta-storage-4.4.0.jar").touch()
    settings = session_settings(str(tmp_path))
    assert settings["spark.jars"].count(".jar") == 2
    assert "spark.jars.packages" not in settings


def test_jars_in_the_folder_of_spark_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The image of a container has the jars there, so that nothing is downloaded."""
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    (tmp_path / "jars").mkdir()
    _, artifact, version = coordinates().split(":")
    (tmp_path / "jars" / f"io.delta_{artifact}-0.0.1.jar").touch()
    assert in_sparks_jars() is None
    assert coordinates() in session_settings(None)["spark.jars.packages"]
    jar = tmp_path / "jars" / f"io.delta_{artifact}-{version}.jar"
    jar.touch()
    assert in_sparks_jars() == str(jar)
    assert session_settings(None) == SETTINGS
    assert delta(None) == CheckRow("Delta's jars", "ok", str(jar))


IVY = b""":: loading settings :: url = jar:file:/x/ivy.jar!/org/apache/ivy/core/settings/ivysettings.xml
Ivy Default Cache set to: /root/.ivy2/cache
The jars for the packages stored in: /root/.ivy2/jars
io.delta#delta-spark_4.2_2.13 added as a dependency
:: resolving dependencies :: org.apache.spark#spark-submit-parent;1.0
\tconfs: [default]
"""
LOST = b"""\t\t::::::::::::::::::::::::::::::::::::::::::::::
\t\t::          UNRESOLVED DEPENDENCIES         ::
\t\t:: io.delta#delta-spark_4.2_2.13;4.4.0: not found
"""


def test_unavailable_jars_are_reported() -> None:
    assert jars_problem(IVY) is None
    problem = jars_problem(IVY + LOST)
    assert problem is not None
    assert "io.delta:delta-spark_4.2_2.13:4.4.0" in problem.what
    assert "--delta-jars" in str(problem)
    assert all(IVY_NOISE.match(line) for line in (IVY + LOST).splitlines())
    assert not IVY_NOISE.match(b"26/11/21 20:00:00 WARN something to hear")


@pytest.mark.parametrize(
    ("conf", "has_jars", "message"),
    [
        ({}, False, "without Delta's jars"),
        ({}, True, "without Delta's settings"),
        ({"spark.sql.extensions": "x", "spark.sql.catalog.spark_catalog": "y"}, False, "without Delta's jars"),
        ({"spark.sql.extensions": "x", "spark.sql.catalog.spark_catalog": "y"}, True, ""),
    ],
)
def test_settings_missing_from_spark_submit_are_reported(conf: dict[str, str], has_jars: bool, message: str) -> None:
    def for_name(*_: object) -> None:
        if not has_jars:
            raise RuntimeError("java.lang.ClassNotFoundException")

    loader = SimpleNamespace(currentThread=lambda: SimpleNamespace(getContextClassLoader=lambda: None))
    lang = SimpleNamespace(Class=SimpleNamespace(forName=for_name), Thread=loader)
    jvm = SimpleNamespace(java=SimpleNamespace(lang=lang))
    context: Any = SimpleNamespace(getConf=lambda: conf, _jvm=jvm)
    if not message:
        require_delta(SimpleNamespace(sparkContext=context))
        return
    with pytest.raises(UsageProblem, match=message) as reported:
        require_delta(SimpleNamespace(sparkContext=context))
    assert ("--packages" in str(reported.value)) == (not has_jars)
    assert "spark-delta.conf" in str(reported.value)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_the_lock_of_the_tables_is_a_regular_file(tmp_path: Path, kind: str) -> None:
    """With a link or a pipe, a user with write access to the folder could make root create a file elsewhere, or wait
    forever."""
    lock, elsewhere = tmp_path / "ledger" / LOCK, tmp_path / "elsewhere"
    lock.parent.mkdir()
    lock.symlink_to(elsewhere) if kind == "link" else os.mkfifo(lock)
    with pytest.raises(KeytailError, match="not a regular file"), alone(str(lock.parent)):
        raise AssertionError("not reached")
    assert not elsewhere.exists()
