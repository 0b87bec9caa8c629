"""Envoy's files of a fleet: their content, the order of changes, and that Envoy accepts them."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.config import ClusterConfig
from cluster.envoy import EnvoyFiles, write_bootstrap
from cluster.envoy_process import EnvoyError, find_envoy
from cluster.fleet import (
    Fleet,
    Replica,
    ReplicaState,
    draining,
    switched,
    with_release,
    with_replica,
    with_weights,
)
from tests.cluster.envoy_fleet import envoy_program, write_fleet

CODER: dict[str, Any] = {"name": "coder"}
CHAT: dict[str, Any] = {"name": "chat", "http_port": 8501, "grpc_port": None}


def replica(name: str, release: str = "blue", **fields: Any) -> Replica:
    known = Replica(name, "coder", release, "10.0.0.1", 9001, 9000, f"numbers-of-{release}", ReplicaState.READY)
    return replace(known, **fields)


def made(*replicas: Replica, **settings: Any) -> tuple[ClusterConfig, Fleet]:
    config = ClusterConfig.model_validate({"models": [CODER], **settings})
    fleet = with_release(Fleet.of(config), "coder", "green")
    for each in replicas:
        fleet = with_replica(fleet, each)
    return config, fleet


def only(path: Path) -> Any:
    """The only resource of a file."""
    (found,) = json.loads(path.read_text())["resources"]
    return found


def listed(files: EnvoyFiles, release: str, face: Any = "http") -> list[tuple[str, int, str]]:
    """Address, port and hash key of each endpoint."""
    groups = only(files.endpoints("coder", release, face))["endpoints"]
    found = []
    for each in (each for group in groups for each in group["lb_endpoints"]):
        address = each["endpoint"]["address"]["socket_address"]
        key = each["metadata"]["filter_metadata"]["envoy.lb"]["hash_key"]
        found.append((address["address"], address["port_value"], key))
    return found


def test_endpoints_are_the_pool_and_change_separately(tmp_path: Path) -> None:
    files = EnvoyFiles(tmp_path)
    config, fleet = made(replica("a"), replica("b", host="10.0.0.2"), replica("m", fingerprint="others"))
    assert len(write_fleet(config, fleet, files)) == 7
    assert listed(files, "blue") == [("10.0.0.1", 9001, "a"), ("10.0.0.2", 9001, "b")]
    assert listed(files, "blue", "grpc") == [("10.0.0.1", 9000, "a"), ("10.0.0.2", 9000, "b")]
    assert listed(files, "green") == []
    assert write_fleet(config, fleet, files) == []
    changed = write_fleet(config, draining(fleet, "a"), files)
    assert set(changed) == {files.endpoints("coder", "blue", face) for face in ("http", "grpc")}  # type: ignore[arg-type]
    assert listed(files, "blue") == [("10.0.0.2", 9001, "b")]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_clusters_exist_before_their_routes(tmp_path: Path) -> None:
    files = EnvoyFiles(tmp_path)
    config, fleet = made(replica("a"), replica("g", "green"))
    order = [path.name.split(".")[0] for path in write_fleet(config, fleet, files)]
    assert order == ["endpoints"] * 4 + ["clusters"] + ["routes"] * 2


def test_sessions_are_split_by_hash_and_calls_without_one_go_to_the_live_release(tmp_path: Path) -> None:
    files = EnvoyFiles(tmp_path)
    config, fleet = made(replica("a"), replica("g", "green"))
    write_fleet(config, with_weights(fleet, "coder", {"blue": 90, "green": 10}), files)
    workspace, session, rest = only(files.routes("coder", "http"))["virtual_hosts"][0]["routes"]
    for route, header in ((workspace, "x-workspace-id"), (session, "x-session-id")):
        assert route["match"]["headers"][0]["name"] == header
        assert route["route"]["hash_policy"] == [{"header": {"header_name": header}}]
        arms = route["route"]["weighted_clusters"]
        assert arms["use_hash_policy"]
        split = [(arm["name"].split(".")[1], arm["name"].split(".")[-1], arm["weight"]) for arm in arms["clusters"]]
        assert split == [("green", "affine", 10), ("blue", "affine", 90)]
    assert rest["route"]["cluster"].startswith("coder.blue.")
    assert rest["route"]["cluster"].endswith(".least")
    changed = write_fleet(config, switched(fleet, "coder", "green"), files)
    assert set(changed) == {files.routes("coder", "http"), files.routes("coder", "grpc")}


def test_seconds_are_in_envoys_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = EnvoyFiles(tmp_path)
    monkeypatch.setattr("cluster.envoy._EJECTED_S", 1234567.5)
    config, fleet = made(replica("a"), health={"interval_s": 0.00005})
    write_fleet(config, fleet, files)
    cluster = json.loads(files.clusters.read_text())["resources"][0]
    assert cluster["connect_timeout"] == "1s"
    assert cluster["outlier_detection"]["base_ejection_time"] == "1234567.5s"
    assert cluster["health_checks"][0]["interval"] == "0.00005s"


def test_the_admin_port_is_on_loopback_whatever_the_listeners_are(tmp_path: Path) -> None:
    files = EnvoyFiles(tmp_path)
    config, _ = made(listen={"host": "0.0.0.0"})
    write_bootstrap(config, files)
    found = json.loads(files.bootstrap.read_text())
    assert found["admin"]["address"]["socket_address"]["address"] == "127.0.0.1"
    hosts = {each["address"]["socket_address"]["address"] for each in found["static_resources"]["listeners"]}
    assert hosts == {"0.0.0.0"}


def test_without_envoy_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EnvoyError, match="make setup-cluster"):
        find_envoy()


@pytest.mark.parametrize("faces", ["both", "http"])
def test_envoy_accepts_the_bootstrap(tmp_path: Path, faces: str) -> None:
    program = envoy_program()
    files = EnvoyFiles(tmp_path)
    config, fleet = made(replica("a"), models=[CODER, CHAT] if faces == "both" else [CHAT | CODER])
    write_fleet(config, fleet, files)
    write_bootstrap(config, files)
    words = [str(program), "--mode", "validate", "-c", str(files.bootstrap), "--log-level", "warning"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
