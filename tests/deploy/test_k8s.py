"""The manifests in deploy/k8s match the schemas of their kinds, the program and each other."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import ClusterConfig
from cluster.deployment import deployment_of
from specdec.cli.serve import serve_command
from specdec.config import ServerConfig
from tests.server.observe.metrics.scrape import Scrape
from tests.third_party_clients.node_packages import fetched

K8S = Path(__file__).parents[2] / "deploy" / "k8s"
Object = dict[str, Any]
# No registry of packages has their schemas.
UNKNOWN = {"InferencePool", "RayService"}


def objects() -> list[Object]:
    """All there are."""
    return [found for path in sorted(K8S.glob("*.yaml")) for found in yaml.safe_load_all(path.read_text())]


def the(kind: str, name: str) -> Object:
    """The one object of that kind and name."""
    (found,) = [each for each in objects() if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def container(pod: Object, name: str) -> Object:
    """One container of a pod's template."""
    (found,) = [each for each in pod["spec"]["containers"] if each["name"] == name]
    return found


def complaints(found: list[Object]) -> list[str | None]:
    """Return the schema errors of each kind; kinds without errors are absent."""
    folder = fetched(Path(__file__).parent / "k8s", "check.mjs")
    done = subprocess.run(
        ["node", "check.mjs"], cwd=folder, input=json.dumps(found), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found: list[str | None] = json.loads(done.stdout)
    return found


@pytest.mark.node
@pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node.js with npm")
def test_every_object_matches_its_schema() -> None:
    found = objects()
    problems = complaints(found)
    assert {each["kind"] for each, said in zip(found, problems, strict=True) if said is None} == UNKNOWN
    assert [said for said in problems if said] == []


def _wrong(kind: str, name: str, change: Callable[[Object], Any]) -> Object:
    found = copy.deepcopy(the(kind, name))
    change(found["spec"])
    return found


@pytest.mark.node
@pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node.js with npm")
def test_the_schemas_reject_invalid_objects() -> None:
    wrong = [
        _wrong("Deployment", "specdec", lambda spec: spec.update(replicas="two")),
        _wrong("ScaledObject", "specdec", lambda spec: spec.pop("triggers")),
        _wrong("HTTPRoute", "specdec", lambda spec: spec["rules"][0]["timeouts"].update(request="soon")),
    ]
    assert all(complaints(wrong))


def test_the_deployment_starts_the_server_with_valid_options_and_allows_time_for_a_drain() -> None:
    pod = the("Deployment", "specdec")["spec"]["template"]
    serving = container(pod, "specdec")
    flags = {flag for option in serve_command.params for flag in option.opts}
    assert {word for word in serving["args"] if word.startswith("--")} <= flags
    ports = {port["name"]: port["containerPort"] for port in serving["ports"]}
    defaults = ServerConfig()
    assert ports == {"grpc": defaults.grpc_port, "http": defaults.http_port}
    drain_s = int(serving["args"][serving["args"].index("--drain") + 1])
    assert (
        pod["spec"]["terminationGracePeriodSeconds"] > serving["lifecycle"]["preStop"]["sleep"]["seconds"] + drain_s + 5
    )
    probes = {name: serving[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert probes == {"startupProbe": "/readyz", "readinessProbe": "/readyz", "livenessProbe": "/livez"}


def test_selectors_match_existing_pods_and_ports() -> None:
    for workload, service in (("specdec", "specdec"), ("specdec-fleet", "specdec-fleet")):
        pod = (
            the("Deployment", workload)["spec"]["template"]
            if workload == "specdec"
            else the("RayService", "specdec")["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]
        )
        spec = the("Service", service)["spec"]
        assert spec["selector"].items() <= pod["metadata"]["labels"].items()
        names = {port["name"] for each in pod["spec"]["containers"] for port in each.get("ports", [])}
        assert {port["targetPort"] for port in spec["ports"]} <= names
    labels = the("Deployment", "specdec")["spec"]["template"]["metadata"]["labels"]
    assert the("Deployment", "specdec")["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert the("PodDisruptionBudget", "specdec")["spec"]["selector"]["matchLabels"].items() <= labels.items()
    pool = the("InferencePool", "specdec")["spec"]
    assert pool["selector"]["matchLabels"].items() <= labels.items()
    assert pool["targetPorts"] == [{"number": ServerConfig().http_port}]
    ((rule),) = the("HTTPRoute", "specdec")["spec"]["rules"]
    assert [(each["kind"], each["name"]) for each in rule["backendRefs"]] == [("InferencePool", "specdec")]
    workers = the("RayService", "specdec")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    budget = the("PodDisruptionBudget", "specdec-replicas")["spec"]["selector"]["matchLabels"]
    assert all(budget.items() <= group["template"]["metadata"]["labels"].items() for group in workers)


def test_keda_uses_exported_metrics_and_scales_an_existing_deployment(exported: Scrape) -> None:
    spec = the("ScaledObject", "specdec")["spec"]
    target = spec["scaleTargetRef"]
    assert the(target["kind"], target["name"])["apiVersion"] == target["apiVersion"]
    (trigger,) = spec["triggers"]
    assert trigger["metadata"]["query"] == "sum(specdec_requests_waiting)"
    assert "specdec_requests_waiting" in exported.names()
    assert spec["minReplicaCount"] <= the("Deployment", "specdec")["spec"]["replicas"] <= spec["maxReplicaCount"]


def test_the_fleet_on_ray_has_a_valid_configuration() -> None:
    config = ClusterConfig.model_validate(yaml.safe_load(the("ConfigMap", "specdec-fleet")["data"]["cluster.yaml"]))
    spec = the("RayService", "specdec")["spec"]
    head, (group,) = (spec["rayClusterConfig"][name] for name in ("headGroupSpec", "workerGroupSpecs"))
    envoy = container(head["template"], "envoy")
    (model,) = config.models
    ports = {port["name"]: port["containerPort"] for port in envoy["ports"]}
    assert ports == {"grpc": model.grpc_port, "http": model.http_port}
    assert f"{config.folder}/envoy/bootstrap.json" in envoy["command"][-1]
    mounted = {each["mountPath"] for each in envoy["volumeMounts"]}
    assert mounted & {str(folder) for folder in (config.folder, *config.folder.parents)}  # the volume that contains it
    applications = yaml.safe_load(spec["serveConfigV2"])["applications"]
    for application in applications:
        module, _, function = application["import_path"].partition(":")
        assert f"def {function}(" in (K8S.parents[1] / f"{module.replace('.', '/')}.py").read_text()
        args = application["args"]
        assert args["file"] == "/etc/specdec/cluster.yaml"
        assert deployment_of(config, args["model"], args["release"]).app == application["name"]
    assert {each["name"] for each in applications} == {
        f"{model.name}.{release}" for model in config.models for release in model.releases
    }
    assert model.replicas.cpus == int(container(group["template"], "ray-worker")["resources"]["limits"]["cpu"])
    assert group["template"]["spec"]["terminationGracePeriodSeconds"] > config.drain_s + 20
    assert spec["rayClusterConfig"]["rayVersion"] in (K8S.parents[1] / "pyproject.toml").read_text()
