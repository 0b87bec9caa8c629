"""A replica's configuration file: its ports, its id in the settings, and private permissions."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.autoscale import ReplicaLoad
from cluster.config import ClusterConfig, settings_of
from cluster.deployment import deployment_of
from cluster.replica_process import ReplicaProcess
from specdec.errors import ConfigError, ModelError


def replica(folder: Path, settings: dict[str, Any], python: str = "/bin/true") -> ReplicaProcess:
    return ReplicaProcess("coder.blue.0", settings, host="127.0.0.1", folder=folder, python=Path(python), drain_s=1)


def test_every_replica_has_its_own_files(tmp_path: Path) -> None:
    settings = {
        "engine": {"speculation": {"trace_file": "/traces/{replica}.jsonl"}},
        "server": {"capture_dir": "/captured/{replica}", "kv_events": {"topic": "kv@{replica}@m"}},
        "engines": {},
    }
    replica(tmp_path / "state", settings)
    file = tmp_path / "state" / "replicas" / "coder.blue.0" / "specdec.yaml"
    written = yaml.safe_load(file.read_text())
    assert written["engine"]["speculation"]["trace_file"] == "/traces/coder.blue.0.jsonl"
    assert written["server"]["capture_dir"] == "/captured/coder.blue.0"
    assert written["server"]["kv_events"]["topic"] == "kv@coder.blue.0@m"
    assert written["server"]["http_port"] > 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert {stat.S_IMODE(parent.stat().st_mode) for parent in (*file.parents,)[:3]} == {0o700}
    assert settings_of(["{replica}", 3], "a") == ["a", 3]


async def test_a_replica_of_several_models_is_judged_by_all(tmp_path: Path) -> None:
    """The order of the models stays: the first one takes calls that name none."""
    server = {"": ("e", 5, 0.5, 0.25), "writer": ("f", 1, 0.5, 0.25), "coder": ("a", 2, 0.25, 1.0)}

    def answer(request: httpx.Request) -> httpx.Response:
        fingerprint, waiting, wait_s, busy = server[request.url.params.get("model", "")]
        load = {"num_waiting_reqs": waiting, "forecast_wait_s": wait_s, "utilization": busy}
        return httpx.Response(200, json={"numeric_fingerprint": fingerprint, "loads": [load]})

    found = []
    for place, settings in enumerate(({"engines": {"writer": {}, "coder": None}}, {"engines": {}}, {})):
        process = replica(tmp_path / str(place), settings)
        process._client = httpx.AsyncClient(base_url="http://a", transport=httpx.MockTransport(answer))
        found.append(await process.load())
    assert found == [("f+a", ReplicaLoad(3, 0.5, 1.0)), *[("e", ReplicaLoad(5, 0.5, 0.25))] * 2]
    written = yaml.safe_load((tmp_path / "0" / "replicas" / "coder.blue.0" / "specdec.yaml").read_text())
    assert [*written["engines"]] == ["writer", "coder"]


def test_a_missing_interpreter_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"python: /nowhere/python cannot be run \(No such file"):
        replica(tmp_path / "state", {}, "/nowhere/python")


def deployed(kv_events: dict[str, Any], host: str = "127.0.0.1") -> None:
    settings = {"server": {"kv_events": kv_events}}
    config = ClusterConfig.model_validate({"models": [{"name": "coder", "settings": settings}]})
    deployment_of(config, "coder", "blue", host=host)


def test_replicas_of_one_machine_use_different_ports() -> None:
    fixed = "tcp://127.0.0.1:5557"
    with pytest.raises(ConfigError, match=r"coder\.blue: server\.kv_events\.endpoint: .*listen on tcp://127"):
        deployed({"endpoint": fixed})
    with pytest.raises(ConfigError, match=r"server\.kv_events\.replay_endpoint"):
        deployed({"endpoint": fixed, "connect": True, "replay_endpoint": fixed})
    deployed({"endpoint": fixed, "connect": True})
    deployed({"endpoint": "ipc:///run/{replica}.events"})
    deployed({"endpoint": fixed}, host="")  # on several machines each may have one replica
