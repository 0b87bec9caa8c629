"""Several engines in one file: what they share, and what must differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.serving import with_shared_cores
from specdec.config import Config, EngineConfig, load_config
from specdec.errors import ConfigError

TWO = """
engine: {kv_tokens: 4096, aliases: [gpt-4o], speculation: {max_nodes: 7, width: 2}}
engines:
  chat: {target: a}
  fim: {target: b, kv_tokens: 1024, aliases: [codestral], speculation: {max_nodes: 15}}
"""


def load(folder: Path, text: str) -> Config:
    file = folder / "c.yaml"
    file.write_text(text)
    return load_config(file, {"engine.dtype": "int8"})


def test_engines_inherit_unset_fields(tmp_path: Path) -> None:
    config = load(tmp_path, TWO)
    chat, fim = config.engines.values()
    assert [*config.engines] == ["chat", "fim"]
    assert config.engine == chat
    assert (chat.target, chat.kv_tokens, chat.aliases, chat.dtype) == ("a", 4096, ("gpt-4o",), "int8")
    assert (fim.target, fim.kv_tokens, fim.aliases, fim.dtype) == ("b", 1024, ("codestral",), "int8")
    assert [(engine.speculation.max_nodes, engine.speculation.width) for engine in (chat, fim)] == [(7, 2), (15, 2)]
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_an_empty_section_of_an_engine_inherits_all(tmp_path: Path) -> None:
    config = load(tmp_path, "engine: {speculation: {max_nodes: 3}}\nengines:\n  a:\n    speculation:\n")
    assert config.engine.speculation.max_nodes == 3


def test_options_win_over_the_fields_of_every_engine(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"{TWO}  bare:\n")
    options = {"engine.kv_tokens": 2048, "engine.aliases": ["m"], "engine.speculation.max_nodes": 3}
    engines = load_config(file, options).engines.values()
    assert [engine.kv_tokens for engine in engines] == [2048] * 3
    assert [engine.aliases for engine in engines] == [("m",), ("codestral",), ()]
    assert [(engine.speculation.max_nodes, engine.speculation.width) for engine in engines] == [(3, 2)] * 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engines: {a: {target: x}, b: {targt: x}}", "engines.b.targt"),
        ("engine: {kv_tokens: 1}\nengines: {a: {target: x}}", "engines.a.kv_tokens"),
        (
            "engines: {a: {target: x}, b: {target: y, aliases: [A]}}",
            "engines.b.aliases: 'A' is a name of",
        ),
        ("engines: {a: {aliases: [m]}, b: {aliases: [m]}}", "engines.b.aliases: 'm' is a name of engines.a too"),
        ("engine: {speculation: {trace_file: /t}}\nengines: {a: {}, b: {}}", "engines.b.speculation.trace_file"),
        (
            "engines: {a: {}, b: {}}\nserver: {kv_events: {endpoint: 'ipc:///e', replay_endpoint: 'ipc:///e.1'}}",
            "each model has the next port, so ipc:///e.1 would be of engines.a and of engines.b",
        ),
        ("engines: {a/b: {target: x}}", "engines.a/b"),
        ("engines: [x]", "engines"),
        ("engines: {a: 5}", "engines.a"),
    ],
)
def test_invalid_fields_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


@pytest.mark.parametrize(
    ("requested", "cores", "threads"),
    [((0, 0), 2, (1, 1)), ((0, 0), 5, (3, 2)), ((0, 0, 0), 2, (1, 1, 1)), ((3, 0), 8, (3, 5)), ((2, 2), 2, (2, 2)),
     ((2, 0), 2, (2, 1))],
)  # fmt: skip
def test_cores_are_shared(requested: tuple[int, ...], cores: int, threads: tuple[int, ...]) -> None:
    engines = {str(place): EngineConfig(threads=number) for place, number in enumerate(requested)}
    shared = with_shared_cores(engines, cores)
    assert tuple(engine.threads for engine in shared.values()) == threads


@pytest.mark.parametrize(
    ("replay_port", "connect", "fits"), [(5558, False, False), (5558, True, True), (5559, False, True)]
)
def test_each_engine_publishes_and_replays_on_its_own_ports(
    tmp_path: Path, replay_port: int, connect: bool, fits: bool
) -> None:
    """Otherwise a server of two models would report that a port is in use."""
    text = f"""{TWO}
server:
  kv_events: {{endpoint: "tcp://127.0.0.1:5557", replay_endpoint: "tcp://127.0.0.1:{replay_port}", connect: {connect}}}
"""
    if fits:
        load(tmp_path, text)
    else:
        with pytest.raises(
            ConfigError, match=r"127\.0\.0\.1:5558 would be of engines\.chat and of engines\.fim; take one 2 "
        ):
            load(tmp_path, text)
