"""A model's files are untrusted: whatever they contain, one line names the invalid file."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save

from specdec.errors import InvalidRequestError, ModelError
from specdec.models.gguf import GGUFFile, parse_gguf_config
from specdec.models.gguf_tokenizer import convert_gguf_tokenizer
from specdec.models.load import load_model
from specdec.models.resolve import load_tokenizer
from specdec.models.tokenizer import MAX_MERGES
from tests.models.tiny_gguf import write_tiny_gguf

Tiny = Callable[[str], Path]
UP = "model.layers.0.mlp.up_proj.weight"
DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000


@pytest.fixture
def folder(tiny: Tiny, tmp_path: Path) -> Path:
    """A sound model, to be spoilt."""
    return Path(shutil.copytree(tiny("llama"), tmp_path / "copy"))


def refusal(folder: Path) -> str:
    """Return the error, which is one line."""
    with pytest.raises(ModelError) as caught:
        load_model(str(folder), dtype="int8", cache_dir=folder.parent / "cache")
    message = str(caught.value)
    assert "\n" not in message
    return message


def _changed(name: str, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[name].update(values)


@pytest.mark.parametrize(
    "change",
    [
        _changed(UP, shape=[-96, 64]),
        _changed(UP, shape=[2**40, 2**40]),
        _changed(UP, shape=[2**63, 2, 2**63]),
        _changed(UP, shape="many"),
        _changed(UP, data_offsets=[0, 96 * 64 * 4]),  # another tensor has this offset
        _changed(UP, data_offsets=[2**62, 2**63]),
        _changed(UP, dtype="F4096"),
    ],
)
def test_headers_of_safetensors(change: Callable[[dict[str, Any]], None], folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    assert f"{path}: truncated or corrupt" in refusal(folder)


@pytest.mark.parametrize("length", [99 << 20, 2**40, 2**63 + 5, 2**64 - 1])
def test_a_header_that_is_longer_than_its_file(length: int, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    assert f"{path}: truncated or corrupt" in refusal(folder)


@pytest.mark.parametrize("text", [b"[]", b'{"\xff": 1}', DEEP.encode()])
def test_invalid_headers(text: bytes, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    assert f"{path}: truncated or corrupt" in refusal(folder)


def test_data_hidden_by_duplicate_tensor_names_is_not_read(folder: Path) -> None:
    """Every byte of a file belongs to a tensor with a unique name."""
    tensors = load_file(folder / "model.safetensors")
    data = save({**tensors, "other": torch.zeros_like(tensors[UP])})
    renamed = data.replace(b'"other"', json.dumps(UP).encode())
    length = struct.unpack_from("<Q", data)[0] + len(renamed) - len(data)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + renamed[8:])
    assert "truncated or corrupt" in refusal(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", 2**62), ("num_hidden_layers", 10**6), ("hidden_size", 2**62), ("head_dim", -1),
        ("rms_norm_eps", "x"), ("rms_norm_eps", float("nan")), ("rms_norm_eps", []), ("rope_parameters", [1]),
        ("rope_parameters", {"rope_theta": "x"}), ("eos_token_id", "x"), ("eos_token_id", [[1]]), ("text_config", 5),
        ("bos_token_id", {}), ("quantization_config", {"quant_method": []}),
    ],
)  # fmt: skip
def test_values_of_config_json(name: str, value: Any, folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    assert str(folder) in refusal(folder)


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("llama", "rope_parameters", {"rope_theta": 0.0}), ("llama", "rope_parameters", {"rope_theta": float("inf")}),
        ("llama", "rope_parameters", {"rope_theta": 1e4, "rope_type": "linear", "factor": 0}),
        ("llama", "rms_norm_eps", 0), ("mistral", "sliding_window", -1), ("gemma3", "query_pre_attn_scalar", -256),
        ("granite", "residual_multiplier", 0), ("granite", "residual_multiplier", -0.22),
        ("granite", "logits_scaling", 0), ("granite", "attention_multiplier", "x"),
        ("granite", "embedding_multiplier", float("inf")), ("smollm3", "no_rope_layers", 4),
        ("phi3", "rope_scaling", {"type": "su", "short_factor": [1.0] * 8}), ("phi3", "rope_scaling", {"type": "su"}),
        ("phi3", "rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.7}),
        ("phi3", "rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 1.5}),
        ("phi3", "rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.0}), ("phi3", "head_dim", 17),
    ],
)  # fmt: skip
def test_numbers_that_no_model_can_have(family: str, name: str, value: Any, tiny: Tiny, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny(family), tmp_path / "copy"))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    assert f"{folder}: config.json: holds a value of the wrong kind" in refusal(folder)


def test_biases_of_fused_matrices(tiny: Tiny, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny("phi3"), tmp_path / "copy"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.qkv_proj.bias"] = torch.zeros(128)
    (folder / "model.safetensors").write_bytes(save(tensors))
    assert "biases of fused matrices are not supported" in refusal(folder)


def test_fused_matrices_have_the_rows_of_their_parts(tiny: Tiny, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny("phi3"), tmp_path / "copy"))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 80}))
    assert "layers.0.gate_up has 192 rows, its parts have 160" in refusal(folder)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", DEEP),
        ("generation_config.json", '{"eos_token_id": {"a": 1}}'),
        ("model.safetensors.index.json", '{"weight_map": []}'),
        ("model.safetensors.index.json", '{"weight_map": {"a": 5}}'),
        ("tokenizer.json", DEEP),
        ("tokenizer_config.json", '{"bos_token": {"content": ["a"]}}'),
        ("tokenizer_config.json", '{"bos_token": "\\ud800"}'),
        ("tokenizer_config.json", '{"pad_token": "\\ud800"}'),
        ("tokenizer_config.json", '{"chat_template": 5}'),
        ("tokenizer_config.json", '{"chat_template": "\\ud800"}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}'),
        ("chat_template.jinja", "\udcff"),
    ],
)
def test_other_files(file: str, text: str, folder: Path) -> None:
    if "index" in file:
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / file).write_text(text, encoding="utf-8", errors="surrogateescape")
    assert str(folder) in refusal(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"model": None}, {"model": []}, {"added_tokens": None}, {"added_tokens": [5]}, {"added_tokens": [{}]},
        {"post_processor": 5}, {"post_processor": {"type": "TemplateProcessing", "single": [5]}}, {"normalizer": "x"},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(" * 20_000 + ")" * 20_000}, "behavior": "Isolated",
                           "invert": False}},
        {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b c"]}},
        {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"], "continuing_subword_prefix": "##"}},
    ],
)  # fmt: skip
def test_values_of_tokenizer_json(change: dict[str, Any], folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelError, match=r"tokenizer\.json") as caught:
        load_tokenizer(str(folder), folder.parent / "cache")
    assert str(folder) in str(caught.value)


def test_a_pattern_with_endless_backtracking_affects_its_request_only(folder: Path) -> None:
    path = folder / "tokenizer.json"
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pre_tokenizer": pattern}))
    tokenizer = load_tokenizer(str(folder), folder.parent / "cache")
    with pytest.raises(InvalidRequestError, match="has a pattern that cannot split this text"):
        tokenizer.encode("a" * 40)
    assert tokenizer.encode("hello")


@pytest.fixture(scope="module")
def gguf_file(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound one."""
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_tiny_gguf(tiny("llama"), path, Kind.F32)
    return path


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("llama.block_count", 2**31), ("llama.expert_count", "x"), ("llama.rope.freq_base", "x"),
        ("llama.attention.layer_norm_rms_epsilon", []), ("llama.attention.head_count", 2**62),
        ("tokenizer.ggml.tokens", 5), ("tokenizer.ggml.tokens", [1, 2]), ("tokenizer.ggml.token_type", 5),
        ("tokenizer.ggml.merges", [1]), ("tokenizer.ggml.merges", 5), ("tokenizer.ggml.merges", ["ab"]),
        ("tokenizer.ggml.bos_token_id", "x"), ("tokenizer.chat_template", 5),
        ("tokenizer.ggml.token_type", ["1"] * 384), ("tokenizer.ggml.token_type", "1" * 384),
    ],
)  # fmt: skip
def test_metadata_of_gguf_files(name: str, value: Any, gguf_file: Path) -> None:
    file = GGUFFile(gguf_file)
    file.metadata[name] = value
    with pytest.raises(ModelError) as caught:
        assert parse_gguf_config(file) is None or convert_gguf_tokenizer(file) is None
    assert str(gguf_file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pattern_of_windows_for_other_layers(tiny: Tiny, tmp_path: Path) -> None:
    write_tiny_gguf(tiny("gemma3"), tmp_path / "m.gguf", Kind.F32)
    file = GGUFFile(tmp_path / "m.gguf")
    file.metadata["gemma3.attention.sliding_window_pattern"] = [True, False, True]
    with pytest.raises(ModelError, match="has 3 entries for 4 layers"):
        parse_gguf_config(file)


def test_a_vocabulary_whose_merges_would_take_minutes(gguf_file: Path) -> None:
    file = GGUFFile(gguf_file)
    tokens = file.metadata["tokenizer.ggml.tokens"]
    file.metadata |= {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.tokens": [*tokens[:-1], "a" * 1_000_000],
    }  # fmt: skip
    with pytest.raises(ModelError, match="a token of 1000000 characters"):
        convert_gguf_tokenizer(file)


@pytest.mark.parametrize("shape", [(0, 64), (96, 0), (2**40, 2**40)])
def test_shapes_of_gguf_tensors(shape: tuple[int, int], gguf_file: Path, tmp_path: Path) -> None:
    data = gguf_file.read_bytes()
    name = b"blk.0.ffn_up.weight"
    at = data.index(name) + len(name) + 4
    path = tmp_path / "spoilt.gguf"
    path.write_bytes(data[:at] + struct.pack("<QQ", *shape[::-1]) + data[at + 16 :])
    with pytest.raises(ModelError, match=str(path)):
        GGUFFile(path)


@pytest.mark.parametrize(("name", "other"), [(b"attn_q.weight", b"attn_k.weight"), (b"bos_token_id", b"eos_token_id")])
def test_names_that_a_gguf_file_has_twice(name: bytes, other: bytes, gguf_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "spoilt.gguf"
    path.write_bytes(gguf_file.read_bytes().replace(name, other))
    with pytest.raises(ModelError, match=rf"{path}: two tensors, or two metadata fields, share a name"):
        GGUFFile(path)


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
def test_blocks_whose_scale_is_no_number(kind: Kind, tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(tiny("llama"), path, kind)
    data = bytearray(path.read_bytes())
    block = GGUFFile(path).tensors["blk.0.ffn_up.weight"].offset
    last = block + (2 if kind == Kind.Q4_1 else 0)  # of its scales
    data[last : last + 2] = b"\0\x7e"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"tensor layers\.0\.up holds values that are no finite numbers; fetch"):
        load_model(str(path), cache_dir=tmp_path / "cache", dtype="auto")


@pytest.mark.parametrize("kind", ["fifo", "endless"])
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"]
)
def test_endless_files_are_rejected_by_name(kind: str, name: str, folder: Path) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    os.mkfifo(path) if kind == "fifo" else path.symlink_to("/dev/zero")
    assert f"{path}: is no regular file" in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_clone_without_git_lfs_is_named(name: str, folder: Path) -> None:
    (folder / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 9\n")
    assert f"{folder / name}: only stands for a file in Git LFS; run `git lfs pull`" in refusal(folder)


@pytest.mark.parametrize(("name", "size"), [("config.json", 9 << 20), ("tokenizer.json", 49 << 20)])
def test_the_size_of_a_file_is_checked_before_reading(name: str, size: int, folder: Path) -> None:
    os.truncate(folder / name, size)
    assert f"{folder / name}: has {size} bytes, where at most" in refusal(folder)


def test_millions_of_merges_are_rejected(folder: Path) -> None:
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    data["model"]["merges"] = ["a b"] * (MAX_MERGES + 1)
    path.write_text(json.dumps(data))
    assert f"{folder}: tokenizer.json cannot be read (it has more than {MAX_MERGES} merges)" in refusal(folder)


@pytest.mark.parametrize("token_id", [384, 1 << 31])
def test_ids_that_the_model_has_no_row_for(token_id: int, folder: Path) -> None:
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    data["model"]["vocab"]["!"] = token_id
    path.write_text(json.dumps(data))
    assert f"the tokenizer's ids go up to {token_id}, the model has 384 rows; they do not belong" in refusal(folder)


def test_an_endless_gguf_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.symlink_to("/dev/zero")
    with pytest.raises(ModelError, match="is no regular file"):
        GGUFFile(path)


def test_a_quantisation_of_missing_weights_is_rejected(folder: Path) -> None:
    path = folder / "config.json"
    data = json.loads(path.read_text())
    data["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 7}
    path.write_text(json.dumps(data))
    message = refusal(folder)
    assert "quantization_config (gptq, group_size 7), but none of the weights is quantised" in message
