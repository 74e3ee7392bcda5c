"""The benchmark of plans, at a small size."""

import json

import pytest

from tests.bench import plan


@pytest.mark.long
def test_a_plan_of_many_partitions_is_measured_twice_on_the_same_log_dirs(tmp_path, capsys):
    for _ in range(2):
        plan.main([str(tmp_path / "logs"), "--partitions=30", "--segments=2"])
        figures = json.loads(capsys.readouterr().out)
        assert figures["status"] == 0
        assert figures["seconds"] > 0
    assert len(list(tmp_path.glob("logs/*/topic-*"))) == 30
