"""conf/spark-defaults.conf as Spark reads it: every key exists in Spark, every value has its type, and every setting is
explained. The keys named on the page for clusters are also checked.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from keytail.run.spark.settings import CORRECTNESS
from tests.run.cluster import SECURE
from tests.run.test_submit import ROOT, submit

CONF = ROOT / "conf" / "spark-defaults.conf"
KUBERNETES = ROOT / "conf" / "kubernetes" / "spark.conf"
PAGE = ROOT / "lib" / "keytail" / "run" / "CLUSTER.md"
# Keys that end with a user-defined name.
OWN_NAMES = ("spark.executorEnv.", "spark.kubernetes.driver.volumes.", "spark.kubernetes.executor.volumes.",
             "spark.yarn.appMasterEnv.", "spark.kubernetes.driverEnv.", "spark.kubernetes.node.selector.")  # fmt: skip


# Spark reads this key by name; it has no entry in Spark's list of keys.
BY_NAME = {"spark.local.dir"}


def settings() -> dict[str, str]:
    lines = [line.split(None, 1) for line in CONF.read_text().splitlines() if line.startswith("spark.")]
    assert all(len(line) == 2 for line in lines)
    found = {key: value.strip() for key, value in lines}
    assert len(found) == len(lines), "no key may be set twice"
    return found


def named_keys(text: str) -> set[str]:
    keys = {key.rstrip(".") for key in re.findall(r"(?<![\w./-])spark\.[\w.]+", text)}
    keys -= BY_NAME
    return {key for key in keys if not key.startswith(OWN_NAMES) and "." in key[6:] and not key.endswith(".conf")}


def test_every_setting_is_explained() -> None:
    for block in CONF.read_text().split("\n\n"):
        if re.search(r"^spark\.", block, re.MULTILINE):
            assert block.startswith("# "), block


def test_other_users_of_the_hosts_have_no_access() -> None:
    """The settings are those of the test cluster (tests/run/cluster.py), which also has a secret."""
    assert SECURE.items() <= settings().items()
    assert settings()["spark.executorEnv.PYTHONSAFEPATH"] == "1"
    assert not any("secret" in key for key in settings())


@pytest.mark.spark
def test_spark_knows_every_key_and_reads_every_value(tmp_path: Path) -> None:
    """Submit an application with the configuration file: a value of the wrong type makes the application fail."""
    wanted = settings()
    named = set().union(*(named_keys(path.read_text()) for path in (CONF, KUBERNETES, PAGE)))
    keys = sorted(wanted.keys() | named)
    done = submit("--master", "local[1]", str(Path(__file__).with_name("print_settings.py")), *keys)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    unknown = [key for key in answer["known"] if answer["known"][key] is False and not key.startswith(OWN_NAMES)]
    assert not unknown, f"Spark does not know {', '.join(unknown)}"
    assert len(keys) > len(wanted) > 10
    for key, value in {**wanted, **CORRECTNESS}.items():
        assert answer["settings"][key] == value
