"""The manifests for Kubernetes fit the published schemas, each other and the page, and keytail accepts the command line
of the Job. Nothing is run on a Kubernetes."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests import golden
from tests.command_line import Run
from tests.documentation.pages import ROOT, text_of

HOME = ROOT / "conf/kubernetes"
MANIFESTS = [(path, item) for path in sorted(HOME.glob("*.yaml")) for item in yaml.safe_load_all(path.read_text())]
JOB = (HOME / "strimzi-job.yaml").read_text()
PAGE = text_of("lib/keytail/guide/kubernetes.md")
# The oldest and the newest version that the cluster operator of the page and the package have.
VERSIONS = ("1.30", kubernetes_validate.latest_version())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("number", range(len(MANIFESTS)), ids=lambda number: MANIFESTS[number][1]["kind"])
def test_manifests_fit_the_published_schemas(number: int, version: str) -> None:
    kubernetes_validate.validate(MANIFESTS[number][1], version, strict=True)


def test_a_misspelt_field_does_not_fit_the_schema() -> None:
    job = copy.deepcopy(yaml.safe_load(JOB))
    pod = job["spec"]["template"]["spec"]
    pod["securityContext"]["fsgroup"] = pod["securityContext"].pop("fsGroup")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSIONS[-1], strict=True)


def test_all_kinds_are_there() -> None:
    assert [item["kind"] for _, item in MANIFESTS] == ["ServiceAccount", "Role", "RoleBinding", "Pod", "Job"]


def _pod(text: str) -> dict[str, Any]:
    return yaml.safe_load(text)["spec"]["template"]["spec"]


def test_the_job_has_the_volumes_and_the_settings_of_one_broker() -> None:
    pod = _pod(JOB)
    [container] = pod["containers"]
    mounts = {item["name"]: item["mountPath"] for item in container["volumeMounts"]}
    volumes = {item["name"]: item for item in pod["volumes"]}
    assert mounts.keys() == volumes.keys()
    broker = volumes.pop("settings")["configMap"]["name"]
    assert mounts.pop("settings") == "/etc/strimzi"
    assert mounts == {name: f"/var/lib/kafka/{name}" for name in volumes}
    claims = {name: item["persistentVolumeClaim"]["claimName"] for name, item in volumes.items()}
    assert claims == {name: f"{name}-{broker}" for name in volumes}
    assert broker in PAGE
    assert pod["restartPolicy"] == "Never"
    assert yaml.safe_load(JOB)["spec"]["backoffLimit"] == 0


def test_the_command_line_of_the_job_runs(run: Run, tmp_path: Path) -> None:
    """The dry run, and what the two changes of the page make of it."""
    golden.unpack(tmp_path)
    changes = re.findall(r"sed 's/(.+?)/(.+?)/'", PAGE)
    assert len(changes) == 2
    seen = {}
    for text in (JOB, *(JOB.replace(old, new) for old, new in changes)):
        [container] = _pod(text)["containers"]
        command, *flags = container["args"]
        assert container["command"] == ["keytail"]
        assert "/etc/strimzi/server.config" in flags
        given = [str(tmp_path / "server.properties") if "/" in flag else flag for flag in flags]
        result = run(command, *given, "--topic-list", "gzip")
        assert result.exit_code == 0, result.stderr
        seen[command, flags[-1]] = result.stdout
    assert [*seen] == [("compact", "/etc/strimzi/server.config"), ("compact", "--execute"),
                       ("verify", "/etc/strimzi/server.config")]  # fmt: skip
    assert "would-compact" in seen["compact", "/etc/strimzi/server.config"]
    assert "compacted" in seen["compact", "--execute"]


def test_pods_of_spark_have_the_user_the_account_and_the_volumes_of_the_job() -> None:
    lines = [line.split(None, 1) for line in (HOME / "spark.conf").read_text().splitlines() if line[:1] == "s"]
    settings = {key: value.strip() for key, value in lines}
    assert len(settings) == len(lines)
    account, role, binding, pod, job = (item for _, item in MANIFESTS)
    assert settings["spark.kubernetes.authenticate.driver.serviceAccountName"] == account["metadata"]["name"]
    names = {item["metadata"]["namespace"] for item in (account, role, binding, job)}
    assert names == {settings["spark.kubernetes.namespace"]}
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert pod["spec"]["securityContext"] == job["spec"]["template"]["spec"]["securityContext"]
    volumes = {"driver": {}, "executor": {}}
    for key, value in settings.items():
        if found := re.fullmatch(r"spark\.kubernetes\.(driver|executor)\.volumes\.(.*)", key):
            volumes[found[1]][found[2]] = value
        if key.endswith("podTemplateFile"):
            assert (ROOT / value).exists()
    assert volumes["driver"] == volumes["executor"]
    assert "data-0-my-cluster-broker-1" in volumes["driver"].values()
