"""A replica's configuration file: its ports, its id in the settings, and private permissions."""

from __future__ import annotations

import asyncio
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from cluster.autoscale import ReplicaLoad
from cluster.config import AutoscalingConfig, ClusterConfig, ReplicasConfig, settings_of
from cluster.deployment import Deployment, deployment_of
from cluster.replica_process import RefusedKeyError, ReplicaProcess
from cluster.state_folder import private_folder
from specdec.errors import ConfigError, ModelError


def replica(
    folder: Path,
    settings: dict[str, Any],
    python: str = "/bin/true",
    cpus: float | None = 1,
    host: str = "127.0.0.1",
) -> ReplicaProcess:
    deployment = Deployment(
        model="coder",
        release="blue",
        settings=settings,
        python=Path(python),
        replicas=ReplicasConfig(cpus=cpus),
        autoscaling=AutoscalingConfig(),
        drain_s=1,
        folder=folder,
    )
    return ReplicaProcess("coder.blue.0", deployment, host)


def written(folder: Path) -> Any:
    """The configuration of the replica."""
    return yaml.safe_load((folder / "replicas" / "coder.blue.0" / "specdec.yaml").read_text())


def test_every_replica_has_its_own_files(tmp_path: Path) -> None:
    settings = {
        "engine": {"speculation": {"trace_file": "/traces/{replica}.jsonl"}},
        "server": {"capture_dir": "/captured/{replica}", "kv_events": {"topic": "kv@{replica}@m"}},
        "engines": {},
    }
    replica(tmp_path / "state", settings)
    file, found = tmp_path / "state" / "replicas" / "coder.blue.0" / "specdec.yaml", written(tmp_path / "state")
    assert found["engine"]["speculation"]["trace_file"] == "/traces/coder.blue.0.jsonl"
    assert found["server"]["capture_dir"] == "/captured/coder.blue.0"
    assert found["server"]["kv_events"]["topic"] == "kv@coder.blue.0@m"
    assert found["server"]["http_port"] > 0
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
    assert [*written(tmp_path / "0")["engines"]] == ["writer", "coder"]


@pytest.mark.parametrize(
    ("settings", "cpus", "threads"),
    [
        ({}, 2.5, 2),
        ({"engine": None}, 0.5, 1),
        ({"engine": {"threads": 0}}, 9, 4),  # the machine has four
        ({"engine": {"threads": 3}}, 2, 3),
        ({"engines": {"writer": None, "coder": {"threads": 2}}}, 3, [1, 2]),
    ],
)
def test_threads_default_to_the_reserved_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], cpus: float, threads: Any
) -> None:
    """Else each replica of a machine would take all of its cores."""
    monkeypatch.setattr("cluster.replica_process.usable_cores", lambda: 4)
    replica(tmp_path / "state", settings, cpus=cpus)
    found = written(tmp_path / "state")
    engines = found.get("engines")
    assert ([engine["threads"] for engine in engines.values()] if engines else found["engine"]["threads"]) == threads


def test_nothing_limits_threads_without_reserved_cores(tmp_path: Path) -> None:
    replica(tmp_path / "state", {}, cpus=None)
    assert "engine" not in written(tmp_path / "state")


def test_sections_of_the_settings_may_be_empty(tmp_path: Path) -> None:
    replica(tmp_path / "state", {"engine": None, "server": None, "engines": None})
    assert written(tmp_path / "state")["server"]["host"] == "127.0.0.1"


@pytest.mark.parametrize(("status", "error"), [(401, RefusedKeyError), (403, RefusedKeyError), (500, ModelError)])
async def test_a_refused_key_is_told_from_other_errors(tmp_path: Path, status: int, error: type[ModelError]) -> None:
    process = replica(tmp_path / "state", {})
    transport = httpx.MockTransport(lambda _: httpx.Response(status))
    process._client = httpx.AsyncClient(base_url="http://a", transport=transport)
    with pytest.raises(ModelError, match=f"answers {status} to /v1/loads") as caught:
        await process.load()
    assert caught.type is error
    assert ("key_file" in str(caught.value)) is (error is RefusedKeyError)


def test_a_machine_may_have_an_ipv6_address(tmp_path: Path) -> None:
    process = replica(tmp_path / "state", {}, host="::1")
    assert process._client.base_url == f"http://[::1]:{process.http_port}"


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (private_folder(tmp_path / "state" / "replicas") / "coder.blue.0" / "specdec.log").mkdir(mode=0o700, parents=True)
    with pytest.raises(ModelError, match=r"folder: .*/replicas/coder\.blue\.0 cannot be written \(Is a directory"):
        replica(tmp_path / "state", {})


def test_a_missing_interpreter_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"python: /nowhere/python is not there, or cannot be run"):
        replica(tmp_path / "state", {}, "/nowhere/python")


def test_bug_an_interpreter_that_cannot_be_run_is_named_beside_grpc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where gRPC runs in a process, the errors of its children may lose their number and kind."""

    def fail(*_: Any, **__: Any) -> None:
        raise subprocess.SubprocessError("Bad exception data from child: b'OSError:'")

    monkeypatch.setattr(subprocess, "Popen", fail)
    with pytest.raises(ModelError, match=r"python: /bin/true cannot be run \(Bad exception data"):
        replica(tmp_path / "state", {})


async def test_bug_modules_in_the_working_folder_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "click.py").write_text("raise SystemExit('of somebody else')\n")
    process = replica(tmp_path / "state", {"engine": {"target": "nowhere"}}, sys.executable)
    while process.alive:
        await asyncio.sleep(0.05)
    assert "nowhere: no such file, folder or catalogue model" in process.exit_reason()


async def test_the_reason_of_an_exit_quotes_no_former_server_of_the_same_id(tmp_path: Path) -> None:
    for target in ("former", "nowhere"):
        process = replica(tmp_path / "state", {"engine": {"target": target}}, sys.executable)
        while process.alive:
            await asyncio.sleep(0.05)
    assert "nowhere: no such file, folder or catalogue model" in process.exit_reason()
    assert "former" not in process.exit_reason()


def deployed(kv_events: dict[str, Any], host: str = "127.0.0.1") -> None:
    settings = {"server": {"kv_events": kv_events}}
    config = ClusterConfig.model_validate({"models": [{"name": "coder", "settings": settings}]})
    deployment_of(config, "coder", "blue", host=host)


def test_replicas_of_one_machine_use_different_ports() -> None:
    fixed = "tcp://127.0.0.1:5557"
    with pytest.raises(ConfigError, match=r"coder\.blue: server\.kv_events\.endpoint: .*listen on tcp://127"):
        deployed({"endpoint": fixed})
    with pytest.raises(ConfigError, match=r"server\.kv_events\.replay_endpoint"):
        deployed({"endpoint": fixed, "connect": True, "replay_endpoint": "tcp://127.0.0.1:5558"})
    deployed({"endpoint": fixed, "connect": True})
    deployed({"endpoint": "ipc:///run/{replica}.events"})
    deployed({"endpoint": fixed}, host="")  # on several machines each may have one replica


def test_a_key_file_holds_one_key(tmp_path: Path) -> None:
    """It may be taken for the keys file, whose content no header can hold."""
    file = tmp_path / "key"
    config = ClusterConfig.model_validate({"models": [{"name": "coder", "key_file": file}]})
    for content in ("", "- name: alice\n  hash: sha256:0\n", "old\nnew\n"):
        file.write_text(content)
        with pytest.raises(ConfigError, match=r"coder\.key_file: .* must hold one key and nothing else"):
            deployment_of(config, "coder", "blue")
    file.write_text("secret\n")
    assert deployment_of(config, "coder", "blue").key == "secret"


def test_a_key_file_of_no_user_is_named() -> None:
    models = [{"name": "coder", "key_file": "~nobody-by-this-name/key"}]
    with pytest.raises(ConfigError, match=r"coder\.key_file: ~nobody-by-this-name/key "):
        deployment_of(ClusterConfig.model_validate({"models": models}), "coder", "blue")


def test_keys_cross_the_network_of_several_machines_only_if_the_settings_say_so(tmp_path: Path) -> None:
    """Else every replica would exit at its start."""
    (tmp_path / "key").write_text("secret")
    server: dict[str, Any] = {"keys_file": "/keys.yaml"}
    model = {"name": "coder", "settings": {"server": server}, "key_file": tmp_path / "key"}
    config = ClusterConfig.model_validate({"models": [model]})
    deployment_of(config, "coder", "blue")
    with pytest.raises(ConfigError, match=r"coder\.blue: server\.keys_file: .* set server\.keys_without_tls: true"):
        deployment_of(config, "coder", "blue", host="")
    server["keys_without_tls"] = True
    deployment_of(ClusterConfig.model_validate({"models": [model]}), "coder", "blue", host="")
