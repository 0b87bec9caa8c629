"""cluster.yaml: valid content, and errors that name the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import ClusterConfig, fixed_changes, load_cluster_config
from cluster.deployment import deployment_of
from specdec.errors import ConfigError

CODER = {"name": "coder"}


def load(folder: Path, data: Any) -> Any:
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(data))
    return load_cluster_config(file)


def test_a_model_needs_only_a_name(tmp_path: Path) -> None:
    config = load(tmp_path, {"models": [CODER], "listen": None})
    model = config.model("coder")
    assert (model.http_port, model.grpc_port, list(model.releases)) == (8401, 8400, ["blue"])
    assert model.server_config("blue").engine.target == "smollm2-135m"


@pytest.mark.parametrize("empty", ["settings", "replicas", "autoscaling", "releases"])
def test_a_section_with_nothing_under_it_is_as_if_left_out(tmp_path: Path, empty: str) -> None:
    """As with all its fields commented out."""
    assert load(tmp_path, {"models": [{**CODER, empty: None}]}) == load(tmp_path, {"models": [CODER]})


def test_a_release_and_sections_of_its_settings_may_be_empty(tmp_path: Path) -> None:
    settings = {"engine": {"threads": 2}, "engines": None, "server": None}
    releases = {"blue": None, "green": {"weight": 0, "settings": None}}
    model = load(tmp_path, {"models": [{**CODER, "settings": settings, "releases": releases}]}).model("coder")
    assert [model.server_config(name).engine.threads for name in releases] == [2, 2]


def test_settings_of_a_release_override_the_models(tmp_path: Path) -> None:
    settings = {"engine": {"target": "a", "threads": 2}, "server": {"metrics_compat": "vllm"}}
    releases = {"blue": {}, "green": {"weight": 0, "settings": {"engine": {"dtype": "bf16"}}}}
    model = load(tmp_path, {"models": [{**CODER, "settings": settings, "releases": releases}]}).model("coder")
    blue, green = model.server_config("blue"), model.server_config("green")
    assert (blue.engine.dtype, green.engine.dtype) == ("auto", "bf16")
    assert green.engine.threads == 2
    assert green.server.metrics_compat == "vllm"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({}, "models: Field required"),
        ([], "must hold a mapping with `models:`"),
        ({"models": []}, "models: must name at least one model"),
        (
            {"models": [{**CODER, "releases": {"v2.blue": {}}}, {"name": "coder.v2", "http_port": 1, "grpc_port": 2}]},
            "coder.v2.blue is a release of coder and of coder.v2; rename one",
        ),
        ({"models": [{"name": "a b"}]}, "models.0.name"),
        ({"models": [CODER, {**CODER, "http_port": 1, "grpc_port": 2}]}, "two models are named 'coder'"),
        ({"models": [CODER, {"name": "chat"}]}, "chat.http_port is 8401, the same as coder.http_port"),
        ({"models": [{**CODER, "grpc_port": 8401}]}, "coder.grpc_port is 8401, the same as coder.http_port"),
        ({"models": [CODER], "listen": {"admin_port": 8400}}, "listen.admin_port is 8400, the same as coder.grpc_port"),
        ({"models": [{**CODER, "http_port": None, "grpc_port": None}]}, "no client could connect"),
        ({"models": [{**CODER, "replicas": {"min": 3}}]}, "models.0.replicas: min is 3, above max"),
        ({"models": [{**CODER, "settings": {"engine": {"treads": 1}}}]}, "settings of release blue: engine.treads"),
        ({"models": [{**CODER, "releases": {"blue": {"weight": 0}}}]}, "releases: at least one needs a weight above 0"),
        ({"models": [{**CODER, "releases": {}}]}, "models.0: releases: at least one needs"),
        ({"models": [CODER], "routing": {"affinity_headers": ["X Session"]}}, "routing.affinity_headers.0"),
        ({"models": [CODER], "routing": {"retries": 11}}, "routing.retries"),
        ({"models": [CODER], "listen": {"tls_cert": "c.pem"}}, "listen: tls_cert needs tls_key"),
        ({"models": [CODER], "listen": {"tls_client_ca": "c.pem"}}, "tls_client_ca needs tls_cert"),
        ({"models": [{**CODER, "http_port": False}]}, "models.0.http_port: must not be true or false"),
        ({"models": [CODER], "drain": 3}, "drain: there is no such field, did you mean `drain_s`?"),
        ({"models": [CODER], "drain_s": float("inf")}, "drain_s: Input should be a finite number"),
        ({"models": [{**CODER, "replicas": {"gpus": 1.5}}]}, "models.0.replicas.gpus: 1.5 GPUs"),
        (
            {"models": [CODER], "listen": {"host": "localhost"}},
            "listen.host: 'localhost' is not an IP address",
        ),
        (
            {"models": [{**CODER, "settings": {"server": {"capture_dir": "/captured"}}}]},
            "release blue: server.capture_dir: every replica would write /captured; put {replica}",
        ),
        (
            {"models": [{**CODER, "settings": {"engine": {"speculation": {"trace_file": "t"}}}}]},
            "release blue: engine.speculation.trace_file: every replica would write t",
        ),
        (
            {"models": [{**CODER, "settings": {"server": {"kv_events": {"endpoint": "ipc:///tmp/events"}}}}]},
            "release blue: server.kv_events.endpoint: every replica would write ipc:///tmp/events",
        ),
        ({"models": [{**CODER, "settings": {"server": {"keys_file": "k"}}}]}, "keys_file needs the model's key_file"),
        (
            {"models": [{**CODER, "settings": {"server": {"tls_cert": "c.pem", "tls_key": "k.pem"}}}]},
            "server.tls_cert: Envoy connects to replicas without TLS",
        ),
    ],
)
def test_invalid_fields_are_named(tmp_path: Path, data: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, data)
    assert problem in str(caught.value)
    assert "cluster.yaml" in str(caught.value)


@pytest.mark.parametrize("model", [{"name": "a b"}, {**CODER, "releases": {"blue": {"weight": 101}}}])
def test_an_invalid_item_is_the_only_problem(tmp_path: Path, model: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, {"models": [model]})
    assert ";" not in str(caught.value)


def test_bug_headers_are_named_in_any_case(tmp_path: Path) -> None:
    """Envoy knows them in lower case."""
    config = load(tmp_path, {"models": [CODER], "routing": {"affinity_headers": ["X-Workspace-Id", "x-user"]}})
    assert config.routing.affinity_headers == ("x-workspace-id", "x-user")


def test_relative_paths_do_not_depend_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors of Ray read the configuration too, in other folders."""
    monkeypatch.chdir(tmp_path)
    listen = {"tls_cert": "c.pem", "tls_key": "k.pem", "tls_client_ca": "a.pem"}
    config = load(tmp_path, {"models": [CODER], "folder": "state", "listen": listen})
    assert config.folder == tmp_path / "state"
    found = (config.listen.tls_cert, config.listen.tls_key, config.listen.tls_client_ca)
    assert found == (tmp_path / "c.pem", tmp_path / "k.pem", tmp_path / "a.pem")


@pytest.mark.parametrize(
    ("python", "expected"),
    [
        (".venv/bin/python", "HERE/.venv/bin/python"), ("./python", "HERE/python"), ("~/py", "~/py"),
        ("/usr/bin/python3", "/usr/bin/python3"), ("python3.12", "python3.12"),
    ],
)  # fmt: skip
def test_an_interpreter_is_a_fixed_path_or_a_name_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str, expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(tmp_path, {"models": [{**CODER, "releases": {"blue": {"python": python}}}]})
    deployed = deployment_of(config, "coder", "blue").python
    assert str(deployed) == expected.replace("HERE", str(tmp_path))
    assert ClusterConfig.model_validate_json(config.model_dump_json()) == config  # as a restarted reconciler reads it


def test_settings_that_a_running_fleet_cannot_change_are_named(tmp_path: Path) -> None:
    former = load(tmp_path, {"models": [CODER]})
    same = {**CODER, "replicas": {"max": 3}, "settings": {"engine": {"threads": 1}}}
    assert fixed_changes(former, load(tmp_path, {"models": [same], "drain_s": 300})) == []
    moved = load(tmp_path, {"models": [{**CODER, "http_port": 9000}], "listen": {"admin_port": 9001}})
    assert fixed_changes(former, moved) == ["listen.admin_port", "coder.http_port"]
    other = load(tmp_path, {"models": [{"name": "chat"}], "folder": "/elsewhere"})
    assert fixed_changes(former, other) == [
        "folder", "coder.http_port", "coder.grpc_port", "chat.http_port", "chat.grpc_port"
    ]  # fmt: skip


def test_an_unknown_model_is_named_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model 'chat' in the cluster; there are: coder"):
        load(tmp_path, {"models": [CODER]}).model("chat")


def test_bug_relative_paths_in_settings_are_those_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas run in other folders, and on other machines, where `~` is another one too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    engine = {
        "target": "org/model", "draft": "draft.gguf", "cache_dir": "~/cache", "kv_disk_folder": "disk/{replica}",
        "indexes": {"mine": "mine.index"}, "threads": 2,
    }  # fmt: skip
    server = {"keys_file": "keys.yaml", "capture_dir": "/captured/{replica}", "drain_s": 3}
    server["experiments"] = {"folder": "/kept/{replica}", "start": ["plan.yaml", "~/plan.yaml"]}
    named: Any = {"draft": {"target": "org/other", "draft_head": "./head"}, "auto": {"draft": "auto", "indexes": None}}
    named["auto"]["speculation"] = {"trace_file": "trace.{replica}"}
    model = {**CODER, "key_file": "key", "settings": {"engine": engine, "server": server, "engines": named}}
    (tmp_path / "key").write_text("secret")
    found = deployment_of(load(tmp_path, {"models": [model]}), "coder", "blue").settings
    assert found["engine"] == engine | {
        "target": f"{tmp_path}/org/model", "draft": f"{tmp_path}/draft.gguf",
        "kv_disk_folder": f"{tmp_path}/disk/{{replica}}", "indexes": {"mine": f"{tmp_path}/mine.index"},
    }  # fmt: skip
    started = {"folder": "/kept/{replica}", "start": [f"{tmp_path}/plan.yaml", "~/plan.yaml"]}
    assert found["server"] == server | {"keys_file": f"{tmp_path}/keys.yaml", "experiments": started}
    assert found["engines"]["draft"] == {"target": "org/other", "draft_head": f"{tmp_path}/head"}
    trace = {"trace_file": f"{tmp_path}/trace.{{replica}}"}
    assert found["engines"]["auto"] == {"draft": "auto", "indexes": None, "speculation": trace}
