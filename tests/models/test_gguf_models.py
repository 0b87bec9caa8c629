"""Models read from GGUF files, against the HF models they were written from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from specdec.errors import ModelError, UnsupportedModelError
from specdec.models.checkpoint import read_json
from specdec.models.gguf import GGUFFile, GGUFSource, parse_gguf_config
from specdec.models.hf import parse_hf_config
from specdec.models.load import load_model
from specdec.models.memory import measure_model
from tests.models.oracle_weights import differences
from tests.models.tiny import FAMILIES, load_oracle, make_tiny_model
from tests.models.tiny_gguf import interleave, write_tiny_gguf
from verify_kernels.packed_weights import PackedLinear, StackedLinear, pack_block_linear, round_blocks, unpack_linear

Tiny = Callable[[str], Path]


@pytest.mark.parametrize("family", FAMILIES)
def test_float_file_equals_its_source(family: str, tiny: Tiny, tmp_path: Path) -> None:
    folder = tiny(family)
    if family.startswith("granite"):  # so that float32 holds it, as the final norm is divided by it
        folder = make_tiny_model(family, tmp_path / "hf", logits_scaling=1.75)
    write_tiny_gguf(folder, tmp_path / "m.gguf")
    loaded = load_model(str(tmp_path / "m.gguf"), dtype="fp32", cache_dir=tmp_path)
    assert differences(loaded.weights, load_oracle(folder)) == []


@pytest.mark.parametrize(
    ("family", "given"),
    [
        *((family, {}) for family in FAMILIES if family not in ("llama3", "mistral", "mixtral", "gemma3", "smollm3")),
        ("mixtral", {"sliding_window": None}),
        ("gemma3", {"num_hidden_layers": 7, "layer_types": None, "query_pre_attn_scalar": 32}),
        ("smollm3", {"num_hidden_layers": 9, "no_rope_layers": None}),
    ],
)
def test_config_equals_its_source(family: str, given: dict[str, Any], tmp_path: Path) -> None:
    folder = make_tiny_model(family, tmp_path / "hf", **given)
    write_tiny_gguf(folder, tmp_path / "m.gguf")
    ours = load_model(str(tmp_path / "m.gguf"), dtype="fp32", cache_dir=tmp_path).config
    theirs = load_model(str(folder), dtype="fp32", cache_dir=tmp_path).config
    different = {
        name: (getattr(ours, name), getattr(theirs, name))
        for name in theirs.__slots__
        if getattr(ours, name) != getattr(theirs, name)
    }
    assert different.keys() <= {"norm_eps", "attn_scale", "embed_scale", "logits_divisor"}  # stored as float32
    assert all(ours == pytest.approx(theirs) for ours, theirs in different.values())


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_quantised_file_equals_its_stored_values(kind: Kind, tiny: Tiny, tmp_path: Path) -> None:
    stored = {k: torch.from_numpy(v) for k, v in write_tiny_gguf(tiny("llama3"), tmp_path / "m.gguf", kind).items()}
    weights = load_model(str(tmp_path / "m.gguf"), dtype="fp32", cache_dir=tmp_path).weights
    assert torch.equal(weights.embed, stored["token_embd.weight"])
    assert torch.equal(unpack_linear(weights.lm_head), stored["output.weight"])
    for i, layer in enumerate(weights.layers):
        q, k, v = (stored[f"blk.{i}.attn_{x}.weight"] for x in "qkv")
        qkv = unpack_linear(layer.qkv)
        assert torch.equal(interleave(qkv[:64], 4), q)
        assert torch.equal(interleave(qkv[64:96], 2), k)
        assert torch.equal(qkv[96:], v)
        assert torch.equal(unpack_linear(layer.down), stored[f"blk.{i}.ffn_down.weight"])


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_auto_keeps_the_files_own_blocks(kind: Kind, tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(tiny("llama3"), path, kind, others={"attn_v": Kind.Q8_0, "ffn_down": Kind.F16})
    kept, exact = (load_model(str(path), dtype=dtype, cache_dir=tmp_path).weights for dtype in ("auto", "fp32"))
    assert isinstance(kept.lm_head, PackedLinear)
    assert kept.lm_head.kind == kind.name.lower()
    for ours, theirs in zip(kept.layers, exact.layers, strict=True):
        for name in ("qkv", "o", "gate_up"):
            assert torch.equal(unpack_linear(getattr(ours, name)), unpack_linear(getattr(theirs, name)))
        assert isinstance(ours.qkv, StackedLinear) == (kind != Kind.Q8_0)
        assert isinstance(ours.down, PackedLinear)
        assert ours.down.kind == "int8"  # not quantised in the file
    again = load_model(str(path), dtype="auto", cache_dir=tmp_path).weights  # from the cache
    assert torch.equal(unpack_linear(again.layers[1].qkv), unpack_linear(kept.layers[1].qkv))
    assert measure_model(str(path), dtype="auto", cache_dir=tmp_path).weight_bytes < 3 * again.nbytes


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1])
def test_int3_rounds_the_feed_forward_matrices_alone(kind: Kind, tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(tiny("llama3"), path, kind)
    three, four, exact = (
        load_model(str(path), dtype=dtype, cache_dir=tmp_path).weights for dtype in ("int3", "int4", "fp32")
    )
    assert torch.equal(unpack_linear(three.lm_head), unpack_linear(four.lm_head))
    for ours, theirs, stored in zip(three.layers, four.layers, exact.layers, strict=True):
        for name in ("qkv", "o"):
            assert torch.equal(unpack_linear(getattr(ours, name)), unpack_linear(getattr(theirs, name)))
        for name in ("gate_up", "down"):
            weight = unpack_linear(getattr(stored, name))  # rounded once, not from four bits
            rounded = pack_block_linear(round_blocks(weight, "q3_0"), None, "q3_0", weight.shape[1])
            assert torch.equal(unpack_linear(getattr(ours, name)), unpack_linear(rounded))


def test_auto_of_an_unquantised_model_is_int8(tiny: Tiny, tmp_path: Path) -> None:
    auto, plain = (
        load_model(str(tiny("qwen2")), dtype=dtype, cache_dir=tmp_path).weights for dtype in ("auto", "int8")
    )
    assert isinstance(auto.lm_head, PackedLinear)
    assert isinstance(plain.lm_head, PackedLinear)
    assert auto.lm_head.kind == "int8"
    assert torch.equal(auto.lm_head.data, plain.lm_head.data)


@pytest.mark.parametrize("up", [Kind.Q4_0, Kind.Q8_0])
def test_experts_of_a_layer_are_of_one_kind(up: Kind, tmp_path: Path) -> None:
    folder = make_tiny_model("qwen3_moe", tmp_path / "hf", moe_intermediate_size=64)
    stored = write_tiny_gguf(folder, tmp_path / "m.gguf", Kind.Q4_0, others={"ffn_up_exps": up})
    for layer in load_model(str(tmp_path / "m.gguf"), dtype="auto", cache_dir=tmp_path).weights.layers:
        assert isinstance(layer.gate_up, PackedLinear)
        assert isinstance(layer.down, PackedLinear)
        assert isinstance(layer.router, PackedLinear)
        kinds = layer.gate_up.kind, layer.down.kind, layer.router.kind
        assert kinds == ("q4_0" if up == Kind.Q4_0 else "int8", "q4_0", "fp32")
    down = torch.from_numpy(stored["blk.1.ffn_down_exps.weight"])
    assert torch.equal(unpack_linear(layer.down.part(3, 7)), down[3])


def test_wrong_experts_are_rejected(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(tiny("qwen3_moe"), path)
    file = GGUFFile(path)
    for count, words in ((6, r"\[7, 48, 64\] for 6 experts"), (2, "3 experts of 2"), (0, "expert_count.*positive")):
        file.metadata["qwen3moe.expert_count"] = count
        with pytest.raises(ModelError, match=words):
            GGUFSource(file).shape("layers.0.experts.0.gate")
    narrow = make_tiny_model("qwen3_moe", tmp_path / "hf", moe_intermediate_size=40)
    with pytest.raises(UnsupportedModelError, match=r"experts of 64 x 40 are not supported.*multiple of 32.*of 16"):
        load_model(str(narrow), dtype="int8", cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("family", "key", "words"),
    [
        ("qwen3", "expert_count", "experts of architecture 'qwen3' .* qwen3moe, granitemoe, llama"),
        ("granitemoe", "expert_shared_feed_forward_length", "shared experts are not supported"),
    ],
)
def test_other_experts_are_rejected(family: str, key: str, words: str, tiny: Tiny, tmp_path: Path) -> None:
    write_tiny_gguf(tiny(family), tmp_path / "m.gguf")
    file = GGUFFile(tmp_path / "m.gguf")
    file.metadata[f"{family}.{key}"] = 8
    with pytest.raises(UnsupportedModelError, match=words):
        GGUFSource(file)


def test_a_tensor_per_expert_is_rejected(tiny: Tiny, tmp_path: Path) -> None:
    write_tiny_gguf(tiny("mixtral"), tmp_path / "m.gguf")
    file = GGUFFile(tmp_path / "m.gguf")
    file.tensors["blk.0.ffn_gate.0.weight"] = file.tensors.pop("blk.0.ffn_gate_exps.weight")
    with pytest.raises(UnsupportedModelError, match="a tensor per expert is not supported; use a newer file"):
        GGUFSource(file)


def test_a_dense_model_may_have_the_size_of_shared_experts(tiny: Tiny, tmp_path: Path) -> None:
    write_tiny_gguf(tiny("granite"), tmp_path / "m.gguf")
    file = GGUFFile(tmp_path / "m.gguf")
    file.metadata["granite.expert_shared_feed_forward_length"] = 96
    assert GGUFSource(file).config.family == "granite"


def test_llama3_rope_factors(tiny: Tiny, tmp_path: Path) -> None:
    factors = [1.0, 1.0, 1.5, 3.0, 8.0, 8.0, 8.0, 8.0]
    write_tiny_gguf(tiny("llama3"), tmp_path / "m.gguf", rope_factors=factors)
    config = load_model(str(tmp_path / "m.gguf"), dtype="fp32", cache_dir=tmp_path).config
    assert config.rope.scaling == ("factors", *factors)
    again = load_model(str(tmp_path / "m.gguf"), dtype="fp32", cache_dir=tmp_path).config
    assert again == config  # this one is from the cache


def test_rope_factors_and_scaling_are_multiplied(tiny: Tiny, tmp_path: Path) -> None:
    write_tiny_gguf(tiny("llama"), tmp_path / "m.gguf", rope_factors=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    file = GGUFFile(tmp_path / "m.gguf")
    file.metadata |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert parse_gguf_config(file).rope.scaling == ("factors", 4.0, 8.0, 12.0, 16.0, 20.0, 24.0, 28.0, 32.0)
    file.metadata["llama.rope.scaling.type"] = "yarn"
    with pytest.raises(UnsupportedModelError, match="rope scaling 'yarn'"):
        parse_gguf_config(file)


@pytest.mark.parametrize("turns", [{}, {"beta_fast": 24.0, "beta_slow": 2.0}])
def test_yarn_equals_its_source(turns: dict[str, float], tiny: Tiny, tmp_path: Path) -> None:
    write_tiny_gguf(tiny("qwen3"), tmp_path / "m.gguf")
    file = GGUFFile(tmp_path / "m.gguf")
    fields = {
        "type": "yarn",
        "factor": 16.0,
        "original_context_length": 64,
        **{f"yarn_{k}": v for k, v in turns.items()},
    }
    file.metadata |= {f"qwen3.rope.scaling.{key}": value for key, value in fields.items()}
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 64, **turns}
    source = parse_hf_config(read_json(tiny("qwen3") / "config.json") | {"rope_parameters": yarn}, "m")
    found = parse_gguf_config(file)
    assert (found.rope, found.max_context) == (source.rope, 1024)
    assert source.max_context == 1024


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({}, None),
        ({"scale_linear": 4.0}, ("linear", 4.0)),
        ({"scaling.factor": 4.0}, ("linear", 4.0)),
        ({"scaling.factor": 4.0, "scale_linear": 2.0, "scaling.type": "linear"}, ("linear", 4.0)),
        ({"scaling.factor": 0.0, "scaling.type": "linear"}, None),
        ({"scaling.factor": 4.0, "scaling.type": "none"}, None),
    ],
)
def test_spellings_of_linear_rope_scaling(fields: dict[str, Any], scaling: object, tiny: Tiny, tmp_path: Path) -> None:
    write_tiny_gguf(tiny("llama"), tmp_path / "m.gguf")
    file = GGUFFile(tmp_path / "m.gguf")
    file.metadata |= {f"llama.rope.{key}": value for key, value in fields.items()}
    assert parse_gguf_config(file).rope.scaling == scaling


def test_factors_that_a_file_leaves_out(tiny: Tiny, tmp_path: Path) -> None:
    write_tiny_gguf(tiny("granite"), tmp_path / "m.gguf")
    file = GGUFFile(tmp_path / "m.gguf")
    for name in ("attention.scale", "embedding_scale", "residual_scale"):
        file.metadata[f"granite.{name}"] = 0.0
    del file.metadata["granite.logit_scale"]
    config = parse_gguf_config(file)
    assert (config.attn_scale, config.embed_scale, config.logits_divisor) == (0.25, 1.0, 1.0)
    assert config.norm_eps == pytest.approx(0.01)


def test_magnitude_of_yarn_with_a_multiplier(tiny: Tiny, tmp_path: Path) -> None:
    write_tiny_gguf(tiny("ministral3"), tmp_path / "m.gguf")
    file = GGUFFile(tmp_path / "m.gguf")
    for multiplier, magnitude in ((1.0, 1.0), (0.5, 1.138629 / 1.069315), (0.0, 1.138629)):
        file.metadata["mistral3.rope.scaling.yarn_log_multiplier"] = multiplier
        scaling = parse_gguf_config(file).rope.scaling
        assert scaling is not None
        assert scaling[-1] == pytest.approx(magnitude)
    file.metadata["mistral3.attention.temperature_scale"] = 0.0
    assert parse_gguf_config(file).max_context == 2048


def test_folder_with_one_gguf_file(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    write_tiny_gguf(tiny("qwen2"), tmp_path / "f" / "some.gguf")
    assert load_model(str(tmp_path / "f"), dtype="int8", cache_dir=tmp_path).name == "some"
    shutil.copy(tiny("qwen2") / "config.json", tmp_path / "f")  # as many repositories of GGUF files have it
    assert load_model(str(tmp_path / "f"), dtype="int8", cache_dir=tmp_path).name == "some"
    write_tiny_gguf(tiny("qwen2"), tmp_path / "f" / "other.gguf")
    with pytest.raises(ModelError, match=r"holds 2 \.gguf files; name one"):
        load_model(str(tmp_path / "f"), dtype="int8", cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "error", "words"),
    [
        (
            "general.architecture",
            "mamba",
            UnsupportedModelError,
            "architecture 'mamba' is not supported.*gemma3, granite, granitemoe, llama",
        ),
        ("split.count", 2, UnsupportedModelError, "llama-gguf-split --merge"),
        ("general.type", "adapter", UnsupportedModelError, "no model but 'adapter' .general.type.; .*whole model"),
        ("general.type", "mmproj", UnsupportedModelError, "no model but 'mmproj' "),
        ("llama.expert_count", 8, ModelError, "'llama.expert_used_count' must be a positive integer"),
        ("llama.rope.scaling.type", "longrope", UnsupportedModelError, "rope scaling 'longrope'"),
        ("llama.rope.scaling.yarn_ext_factor", 0.5, UnsupportedModelError, "'llama.rope.scaling.yarn_ext_factor' 0.5"),
        ("llama.rope.scaling.attn_factor", 0.5, UnsupportedModelError, "'llama.rope.scaling.attn_factor' 0.5"),
        ("llama.attention.causal", False, UnsupportedModelError, "'llama.attention.causal' False"),
        ("llama.final_logit_softcapping", 30.0, UnsupportedModelError, "'llama.final_logit_softcapping' 30.0"),
        ("llama.attention.value_length", 8, UnsupportedModelError, "equal lengths"),
        ("llama.rope.dimension_count", 8, UnsupportedModelError, "equal lengths"),
        ("llama.attention.head_count_kv", [1, 2], UnsupportedModelError, "differs between layers"),
        ("llama.block_count", None, ModelError, "'llama.block_count' must be a positive integer"),
    ],
)
def test_wrong_metadata_is_rejected(
    key: str, value: Any, error: type[ModelError], words: str, tiny: Tiny, tmp_path: Path
) -> None:
    write_tiny_gguf(tiny("llama"), tmp_path / "m.gguf")
    file = GGUFFile(tmp_path / "m.gguf")
    file.metadata[key] = value
    with pytest.raises(error, match=words):
        parse_gguf_config(file)


def test_a_magnitude_without_factors_is_rejected(tiny: Tiny, tmp_path: Path) -> None:
    write_tiny_gguf(tiny("phi3"), tmp_path / "m.gguf")
    file = GGUFFile(tmp_path / "m.gguf")
    del file.tensors["rope_factors_short.weight"]
    with pytest.raises(UnsupportedModelError, match=r"'phi3.rope.scaling.attn_factor' 1.125 is not supported"):
        parse_gguf_config(file)


@pytest.mark.parametrize("read", [load_model, measure_model])
def test_unsupported_tensor_type_is_rejected(read: Callable[..., object], tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(tiny("llama"), path)
    raw = path.read_bytes()
    name = b"blk.0.ffn_down.weight"
    at = raw.index(name) + len(name) + 4 + 2 * 8  # after its name: dimensions, their sizes, then the type
    assert int.from_bytes(raw[at : at + 4], "little") == Kind.F32
    path.write_bytes(raw[:at] + int(Kind.I32).to_bytes(4, "little") + raw[at + 4 :])
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.ffn_down\.weight has type I32; use a GGUF of one of"):
        read(str(path), dtype="int8", cache_dir=tmp_path)


def test_file_without_vocabulary_or_tensor_is_rejected(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(tiny("llama"), path)
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"blk.1.attn_k.weight", b"blk.1.attn_x.weight"))
    with pytest.raises(ModelError, match=r"tensor blk\.1\.attn_k\.weight is missing"):
        load_model(str(path), dtype="int8", cache_dir=tmp_path)
    path.write_bytes(raw.replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenz"))
    with pytest.raises(ModelError, match="holds no tokenizer"):
        load_model(str(path), dtype="int8", cache_dir=tmp_path)
    path.write_bytes(raw.replace(b"\x04\0\0\0\0\0\0\0gpt2", b"\x04\0\0\0\0\0\0\0bert"))
    with pytest.raises(UnsupportedModelError, match="tokenizer kind 'bert'"):
        load_model(str(path), dtype="int8", cache_dir=tmp_path)


def test_metadata_equals_the_gguf_librarys(tiny: Tiny, tmp_path: Path) -> None:
    write_tiny_gguf(tiny("gemma3"), tmp_path / "m.gguf")
    ours, theirs = GGUFFile(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "m.gguf")
    expected = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == expected
    assert [t.name for t in theirs.tensors] == list(ours.tensors)
    assert [t.data_offset for t in theirs.tensors] == [t.offset for t in ours.tensors.values()]
