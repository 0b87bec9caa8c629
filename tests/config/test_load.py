"""The configuration: defaults that depend on each other, and files that are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.config import EngineConfig, load_config
from specdec.errors import ConfigError
from specdec.models.hf import parse_hf_config


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "c.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_draft_model_enables_its_drafter(tmp_path: Path) -> None:
    free = ("grammar", "prediction", "suffix")
    assert load_config().engine.drafters == free
    assert load_config(write(tmp_path, "engine: {draft: foo}")).engine.drafters == (*free, "model")
    chosen = load_config(write(tmp_path, "engine: {draft: foo, speculation: {drafters: [suffix]}}"))
    assert chosen.engine.drafters == ("suffix",)


def test_overrides_win_and_empty_sections_are_valid(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "engine:\nserver: {grpc_port: 1}\n"), {"engine.target": "x"})
    assert (config.engine.target, config.server.grpc_port) == ("x", 1)
    assert load_config(write(tmp_path, "engine:\nengines:\nserver:\n")) == load_config()
    inner = "engine:\n  speculation:\n    # max_nodes: 3\nserver: {experiments: , kv_events: }"
    assert load_config(write(tmp_path, inner)) == load_config()


def test_paths_begin_at_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    text = """
        engine: {kv_disk_folder: ~/d, indexes: {i: ~/i}, speculation: {trace_file: ~/t}}
        server: {capture_dir: ~/c, keys_file: ~nobody-by-this-name/k, experiments: {folder: ~/e, start: [~/s]}}
    """
    config = load_config(write(tmp_path, text))
    engine, server, home = config.engine, config.server, Path("/home/u")
    assert (engine.cache_dir, engine.kv_disk_folder) == (home / ".cache/specdec", home / "d")
    assert (engine.indexes, engine.speculation.trace_file) == ({"i": home / "i"}, home / "t")
    assert (server.capture_dir, server.experiments.folder, server.experiments.start) == (
        home / "c", home / "e", (home / "s",),
    )  # fmt: skip
    assert server.keys_file == Path("~nobody-by-this-name/k")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine: {targt: x}", r"engine\.targt: there is no such field, did you mean `target`\?"),
        ("engine: {max_nodes: 3}", r"engine\.max_nodes: .*did you mean `engine\.speculation\.max_nodes`\?"),
        ("engine: {drafters: [suffix]}", r"engine\.drafters: .*did you mean `engine\.speculation\.drafters`\?"),
        ("engine: {speculation: fast}", r"engine\.speculation: must hold a mapping of fields$"),
        ("server: {kv_events: 'tcp://127.0.0.1:1'}", r"server\.kv_events: must hold a mapping of fields$"),
        ("engine: {cache_dir: null}", r"engine\.cache_dir: Input is not a valid path$"),
        ("http_port: 1", r"http_port: there is no such field, did you mean `server\.http_port`\?"),
        ("engine: {tls_crt: x}", r"engine\.tls_crt: there is no such field$"),
        ("server: {thread: 1}", r"server\.thread: there is no such field$"),
        ("engines: {a: {targt: x}}", r"engines\.a\.targt: there is no such field, did you mean `target`\?"),
        ("engine: {xyz: 3}", r"engine\.xyz: there is no such field$"),
        ("engine: {aliases: gpt}", r"engine\.aliases: Input should be a list"),
        ("enigne:", "enigne"),
        ("engine: {max_batch: 0}", "max_batch"),
        ("engine: {max_context: 1}", r"engine\.max_context: .*at least 2"),
        ("engine:\n  threads: 1\n  threads: 2\n", r"line 3: the key `threads` is given twice"),
        ("server: {drain_s: 1}\nserver: {drain_s: 2}\n", r"line 2: the key `server` is given twice"),
        ("server: {drain_s: .inf}", r"server\.drain_s: .*finite number"),
        ("engine: {speculation: {profile_s: .nan}}", r"engine\.speculation\.profile_s: .*finite number"),
        ("server: {http_port: no}", r"server\.http_port: .*not be true or false"),
        ("server: {drain_s: off}", r"server\.drain_s: .*not be true or false"),
        ("engine: {speculation: {max_nodes: on}}", r"engine\.speculation\.max_nodes: .*not be true or false"),
        ("engine: {aliases: [a b]}", "engine.aliases.0"),
        ("engine: {prefill_chunk: 500, max_step_rows: 256}", "prefill_chunk"),
        ("engine: {speculation: {drafters: [model]}}", "model"),
        ("[1, 2]", "mapping"),
        ("engine: [1]", "engine"),
        ("a: b: c", "YAML"),
        ("engine: {aliases: [2024-13-01]}", "not valid YAML: month must be in"),
        pytest.param("engine: " + "[" * 3000, "not valid YAML: maximum recursion depth", id="nested"),
        (b"\xff\xfe", "UTF-8"),
    ],
)
def test_an_invalid_file_is_rejected_by_name(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text), {"engine.kernels": "auto"})


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({"max_step_rows": 128}, (128, 128)),
        ({"max_step_rows": 512}, (512, 192)),
        ({"prefill_chunk": 512}, (512, 512)),
        ({"prefill_chunk": 64}, (256, 64)),
        ({"max_step_rows": 512, "prefill_chunk": 300}, (512, 300)),
    ],
)
def test_either_size_of_a_step_can_be_set_alone(given: dict[str, int], sizes: tuple[int, int]) -> None:
    config = EngineConfig.model_validate(given)
    assert (config.max_step_rows, config.prefill_chunk) == sizes


def test_a_null_window_means_none() -> None:
    shape = {
        "model_type": "mistral", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
    }  # fmt: skip
    assert not any(parse_hf_config({**shape, "sliding_window": None}, "m").local_layers)
    assert all(parse_hf_config({**shape, "sliding_window": 16}, "m").local_layers)
