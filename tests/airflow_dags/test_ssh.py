"""Commands on another host, over a Connection of type `ssh`: paramiko's server takes the place of sshd."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.airflow_dags.conftest import Ask
from tests.airflow_dags.test_commands import ECHO, LOOP, ODD

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("airflow")]


def test_commands_over_ssh_have_the_results_of_local_ones(ask: Ask, ssh: dict[str, str], tmp_path: Path) -> None:
    """This includes commands that are stopped, and those whose task is killed. A host that refuses the key is retried,
    as with ssh(1). A connection on which the command cannot be started is closed.
    """
    fields = json.loads(ssh["AIRFLOW_CONN_SSH_B1"])
    unknown = json.dumps({**fields, "login": "root"})
    much = "import sys\nfor n in range(2000): print('e' * 99, file=sys.stderr)\nprint([{}] * 99999)"
    found = ask("over_ssh", [*ECHO, *ODD], [ECHO[0], "-c", much.replace("{}", "{}")], LOOP, str(tmp_path),
                **ssh, AIRFLOW_CONN_SSH_UNKNOWN=unknown)  # fmt: skip
    assert found["odd"] == [0, [{"words": ODD}]]
    assert found["behind a prefix"] == [0, [{"words": ODD}]]
    assert found["much"] == [0, 99_999, 2000]
    assert found["without rows"] == [5, "err|out"]
    assert found["timeout"] == [124, ["up", "not finished after 8 s: stopped", "told"]]
    assert found["wrong key"][0] == 255
    assert "the Connection ssh_unknown: Authentication" in found["wrong key"][1]
    assert found["not started"] == [255, "the Connection ssh_b1: Channel closed.", []]
    assert "there is no Connection ssh_none, or it cannot be read now" in found["no Connection"]
    assert found["killed"] == "told\n"
