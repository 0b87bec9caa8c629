"""Weights and configuration read from Hugging Face folders, against transformers."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model

from specdec.errors import ModelError, UnsupportedModelError
from specdec.models.checkpoint import read_json
from specdec.models.config import RopeConfig
from specdec.models.gguf import ARCHITECTURES
from specdec.models.hf import FAMILIES as KNOWN
from specdec.models.hf import HFSource, parse_hf_config
from specdec.models.load import load_model
from specdec.models.resolve import HFCheckpoint
from tests.kernels.natives import native_backend
from tests.models.oracle_weights import differences
from tests.models.test_decoder_oracle import make_decoder, run_in_chunks
from tests.models.tiny import FAMILIES, load_oracle, make_tiny_model, make_tiny_tokenizer
from tests.models.tiny_gguf import ARCHITECTURES as WRITTEN
from verify_kernels.packed_weights import pack_linear

Tiny = Callable[[str], Path]


def test_every_family_has_a_tiny_model() -> None:
    assert set(KNOWN) <= set(FAMILIES), "add it to FAMILIES of tests/models/tiny.py"
    assert set(ARCHITECTURES) <= set(WRITTEN.values()), "add it to ARCHITECTURES of tests/models/tiny_gguf.py"


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_equal_the_oracles(family: str, tiny: Tiny, tmp_path: Path) -> None:
    loaded = load_model(str(tiny(family)), dtype="fp32", cache_dir=tmp_path)
    assert len(loaded.weights.layers) == loaded.config.n_layers
    assert differences(loaded.weights, load_oracle(tiny(family))) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_config_agrees_with_transformers(family: str, tiny: Tiny) -> None:
    ours, theirs = HFSource(tiny(family)).config, load_oracle(tiny(family)).config
    assert ours.family == ("llama" if family == "llama3" else family)
    assert (ours.vocab_size, ours.hidden_size, ours.n_layers) == (384, 64, theirs.num_hidden_layers)
    assert (ours.n_heads, ours.n_kv_heads, ours.intermediate_size, ours.max_context) == (
        4, 2, 48 if family == "qwen3_moe" else 96, 512
    )  # fmt: skip
    experts = {"qwen3_moe": (7, 3), "granitemoe": (7, 3), "mixtral": (5, 2)}
    assert (ours.experts, ours.experts_per_token) == experts.get(family, (0, 0))
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)
    granite = family.startswith("granite")
    assert ours.norm_eps == theirs.rms_norm_eps / (0.22**2 if granite else 1)
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    usual = getattr(theirs, "query_pre_attn_scalar", ours.head_dim) ** -0.5
    assert ours.attn_scale == pytest.approx(0.4 if granite else usual)
    kind = "sliding_attention" if family in ("mistral", "mixtral") else "full_attention"
    kinds = getattr(theirs, "layer_types", None) or [kind] * 2
    turned = getattr(theirs, "no_rope_layers", None)
    assert ours.local_layers == tuple(not each for each in turned or (kind == "full_attention" for kind in kinds))
    assert ours.rope.local_rotates == (family != "smollm3")
    assert ours.sliding_window == (24 if family in ("mistral", "mixtral", "gemma3") else None)
    gemma = family in ("gemma", "gemma3")
    assert ours.embed_scale == (8.0 if gemma else 3.0 / 0.22 if granite else 1.0)
    assert ours.logits_divisor == (1.7 if granite else 1.0)
    assert (ours.activation, ours.post_norms) == ("gelu_tanh" if gemma else "silu", family == "gemma3")
    assert ours.qk_norm == (family in ("qwen3", "qwen3_moe", "gemma3"))
    assert ours.qkv_bias == (family in ("qwen2", "seed_oss"))


def test_the_names_of_longrope(tiny: Tiny) -> None:
    data = read_json(tiny("phi3") / "config.json")
    spelled = [data | {"rope_scaling": data["rope_parameters"] | {"rope_type": name}} for name in ("su", "yarn")]
    assert [parse_hf_config(each, "m") for each in spelled] == [parse_hf_config(data, "m")] * 2


def test_any_rows_of_parts_of_fused_matrices(tiny: Tiny) -> None:
    source = HFCheckpoint(tiny("phi3")).open()
    for part, size in (("q", 64), ("k", 32), ("v", 32), ("gate", 96), ("up", 96)):
        whole = source.rows(f"layers.1.{part}", 0, size)
        assert source.shape(f"layers.1.{part}") == (size, 64) == tuple(whole.shape)
        for low, high in ((0, 1), (3, 21), (7, 8), (size - 1, size), (9, 9)):
            assert torch.equal(source.rows(f"layers.1.{part}", low, high), whole[low:high])


def test_experts_in_either_spelling() -> None:
    base = {"model_type": "qwen3_moe", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    base |= {"intermediate_size": 96, "vocab_size": 384, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
    by_release_4, by_release_5 = (
        parse_hf_config(base | {name: 6, "norm_topk_prob": True}, "m") for name in ("num_experts", "num_local_experts")
    )
    assert by_release_4 == by_release_5
    assert (by_release_4.experts, by_release_4.experts_per_token, by_release_4.intermediate_size) == (6, 2, 32)
    assert by_release_4.normalise_experts
    assert not parse_hf_config(base, "m").normalise_experts
    assert (by_release_4.head_dim, by_release_4.n_kv_heads) == (16, 4)


@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("mixtral", {}),
        ("granitemoe", {}),
    ],
)
def test_shares_of_experts_are_the_oracles(family: str, given: dict[str, Any], tmp_path: Path) -> None:
    folder = make_tiny_model(family, tmp_path / "m", **given)
    decoder = make_decoder(folder, tmp_path, native_backend())
    with torch.no_grad():
        expected = load_oracle(folder)(torch.tensor([list(range(60))])).logits[0]
    torch.testing.assert_close(run_in_chunks(decoder, list(range(60)), [60]), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", ["int8", "bf16"])
def test_slices_are_packed_like_the_whole_matrix(dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # slices of 640 rows: some lie across the border between q and k, or gate and up
    monkeypatch.setattr("specdec.models.pack.SLICE_VALUES", 640 * 512)
    folder = make_tiny_model("qwen2", tmp_path / "m", hidden_size=512, intermediate_size=1536, num_hidden_layers=1)
    loaded, state = load_model(str(folder), dtype=dtype, cache_dir=tmp_path), load_oracle(folder).state_dict()
    p = "model.layers.0."
    gate_up = torch.cat([state[p + "mlp.gate_proj.weight"], state[p + "mlp.up_proj.weight"]])
    qkv, bias = (torch.cat([state[f"{p}self_attn.{x}_proj.{kind}"] for x in "qkv"]) for kind in ("weight", "bias"))
    for expected, found in (
        (pack_linear(gate_up, None, dtype), loaded.weights.layers[0].gate_up),
        (pack_linear(qkv, bias, dtype), loaded.weights.layers[0].qkv),
        (pack_linear(state["lm_head.weight"], None, dtype), loaded.weights.lm_head),
    ):
        assert (expected.kind, expected.n, expected.k) == (found.kind, found.n, found.k)
        for name in ("data", "scale", "bias"):
            ours, theirs = getattr(found, name), getattr(expected, name)
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours, theirs)
    assert torch.equal(loaded.weights.embed, state["model.embed_tokens.weight"].half())


def test_sharded_equals_unsharded(tiny: Tiny, tmp_path: Path) -> None:
    folder = make_tiny_model("llama3", tmp_path / "sharded", max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    loaded = load_model(str(folder), dtype="fp32", cache_dir=tmp_path)
    assert differences(loaded.weights, load_oracle(tiny("llama3"))) == []
    next(folder.glob("*00002*.safetensors")).unlink()
    with pytest.raises(ModelError, match=r"00002.*missing"):
        load_model(str(folder), dtype="fp32", cache_dir=tmp_path)


def test_bf16_file_loads_exactly(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "m", dtype=torch.bfloat16)
    assert differences(load_model(str(folder), dtype="fp32", cache_dir=tmp_path).weights, load_oracle(folder)) == []


def test_attention_and_mlp_bias_are_kept(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "m", attention_bias=True, mlp_bias=True)
    layer = load_model(str(folder), dtype="fp32", cache_dir=tmp_path).weights.layers[1]
    state = load_oracle(folder).state_dict()
    assert layer.o.bias is not None
    assert layer.down.bias is not None
    assert torch.equal(layer.o.bias[:64], state["model.layers.1.self_attn.o_proj.bias"])
    assert torch.equal(layer.down.bias[:64], state["model.layers.1.mlp.down_proj.bias"])


def test_rope_in_either_form() -> None:
    base = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    base |= {"intermediate_size": 96, "vocab_size": 384}
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = base | {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **scaling}}
    new = base | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    assert parse_hf_config(old, "m") == parse_hf_config(new, "m")
    assert parse_hf_config(old, "m").rope.scaling == ("llama3", 8.0, 1.0, 4.0, 64.0)
    linear = parse_hf_config(base | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "m")
    assert (linear.rope.theta, linear.rope.scaling) == (10000.0, ("linear", 2.0))
    saved = base | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    added = parse_hf_config(saved | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "m")
    assert (added.rope.theta, added.rope.scaling) == (5e5, ("linear", 2.0))
    for family in ("llama", "gemma3"):  # as transformers has it
        within = {
            "model_type": family,
            "rope_theta": 1e4,
            "rope_scaling": {"rope_type": "llama3", "rope_theta": 5e5} | scaling,
        }
        assert parse_hf_config(base | within, "m").rope.theta == 5e5


def test_sparse_multimodal_gemma_config() -> None:
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text |= {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    config = parse_hf_config({"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text}, "m")
    assert (config.n_heads, config.n_kv_heads, config.head_dim, config.attn_scale) == (8, 4, 256, 1 / 16)
    assert (config.rope.theta, config.rope.local_theta, config.rope.scaling) == (1e6, 1e4, ("linear", 8.0))
    assert [i for i, sliding in enumerate(config.local_layers) if not sliding] == [5, 11, 17, 23, 29]
    assert (config.tie_embeddings, config.embed_scale) == (True, math.sqrt(2560))


@pytest.mark.parametrize("changed", [0, 1])
def test_an_output_table_of_its_own_beside_tied_embeddings(changed: int, tmp_path: Path) -> None:
    """As fine-tunes leave it whose trainer untied the two without a word in config.json."""
    folder = make_tiny_model("qwen3", tmp_path / "m", tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"][-changed:] *= 1.5 if changed else 1.0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    decoder = make_decoder(folder, tmp_path, native_backend())
    assert decoder.config.tie_embeddings == (not changed)
    with torch.no_grad():
        expected = load_oracle(folder)(torch.tensor([list(range(60))])).logits[0]
    torch.testing.assert_close(run_in_chunks(decoder, list(range(60)), [60]), expected, rtol=1e-3, atol=1e-3)


def test_bug_tied_tables_that_are_stored_as_the_head(tiny: Tiny, tmp_path: Path) -> None:
    """As save_model of safetensors writes them, which keeps the first name of a shared tensor."""
    folder = _copy(tiny("qwen3"), tmp_path)
    save_model(load_oracle(folder), str(folder / "model.safetensors"), {"format": "pt"})
    assert differences(load_model(str(folder), dtype="fp32", cache_dir=tmp_path).weights, load_oracle(folder)) == []
    data = read_json(folder / "config.json") | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(data))
    with pytest.raises(ModelError, match=r"embed_tokens\.weight is missing"):
        load_model(str(folder), dtype="fp32", cache_dir=tmp_path)


@pytest.mark.parametrize(("family", "tied"), [("gemma", True), ("smollm3", True), ("qwen3", False)])
def test_the_head_stands_for_the_embedding_where_the_family_ties_them(family: str, tied: bool, tmp_path: Path) -> None:
    """In a configuration that does not say, as transformers has it."""
    folder = make_tiny_model(family, tmp_path / "m", tie_word_embeddings=True)
    oracle = load_oracle(folder)
    save_model(oracle, str(folder / "model.safetensors"), {"format": "pt"})
    data = read_json(folder / "config.json")
    del data["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(data))
    if tied:
        assert differences(load_model(str(folder), dtype="fp32", cache_dir=tmp_path).weights, oracle) == []
    else:
        with pytest.raises(ModelError, match=r"embed_tokens\.weight is missing"):
            load_model(str(folder), dtype="fp32", cache_dir=tmp_path)


@pytest.mark.parametrize("family", ["mistral", "ministral3"])
def test_the_language_model_of_a_multimodal_folder(family: str, tmp_path: Path) -> None:
    """As Mistral Small 3.2's: the outer type is the multimodal model's, the inner one the family's."""
    import transformers as hf

    text_class = {"mistral": hf.MistralConfig, "ministral3": hf.Ministral3Config}[family]
    text = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": None, "initializer_range": 0.2}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = hf.Mistral3Config(
        text_config=text_class(**text).to_dict(), vision_config=hf.PixtralVisionConfig(**vision).to_dict()
    )
    model = hf.Mistral3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "m")
    make_tiny_tokenizer(tmp_path / "m")
    with torch.no_grad():
        expected = model(torch.tensor([list(range(20, 80))])).logits[0]
    decoder = make_decoder(tmp_path / "m", tmp_path, native_backend())
    assert decoder.config.family == family
    torch.testing.assert_close(run_in_chunks(decoder, list(range(20, 80)), [60]), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("gemma", "head_dim", 256),
        ("gemma", "max_context", 8192),
        ("seed_oss", "head_dim", 128),
        ("seed_oss", "n_kv_heads", 8),
        ("seed_oss", "max_context", 524288),
        ("smollm3", "n_kv_heads", 4),
        ("ministral3", "head_dim", 128),
        ("ministral3", "n_kv_heads", 8),
        ("ministral3", "norm_eps", 1e-5),
        ("ministral3", "sliding_window", None),
        ("ministral3", "max_context", 16384),
        ("ministral3", "rope", RopeConfig(1e6, None, ("yarn", 16.0, 16384.0, 32.0, 1.0, 1.0))),
        ("granite", "attn_scale", 1.0),
        ("granite", "embed_scale", 1.0),
        ("granite", "max_context", 2048),
    ],
)
def test_fields_that_a_configuration_leaves_out(family: str, field: str, value: Any) -> None:
    data = {"model_type": family, "hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 2}
    assert getattr(parse_hf_config(data | {"intermediate_size": 96, "vocab_size": 384}, "m"), field) == value


def test_queries_scaled_by_position_limit_the_context(tiny: Tiny) -> None:
    data = json.loads((tiny("ministral3") / "config.json").read_text())
    rope = data["rope_parameters"]
    assert parse_hf_config(data, "m").max_context == 512
    assert [parse_hf_config(data | {"sliding_window": 24}, "m").window(layer) for layer in (0, 1)] == [24, 24]
    assert parse_hf_config(data | {"rope_parameters": None, "rope_scaling": rope}, "m").max_context == 512
    added = {key: value for key, value in rope.items() if key != "llama_4_scaling_beta"} | {"factor": 8.0}
    assert parse_hf_config(data | {"rope_scaling": added}, "m").max_context == 512
    assert parse_hf_config(data | {"rope_scaling": rope | {"llama_4_scaling_beta": 0.0}}, "m").max_context == 2048
    data["rope_parameters"] = rope | {"llama_4_scaling_beta": 0.0}
    assert parse_hf_config(data, "m").max_context == 2048
    data["rope_parameters"] = {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1}
    with pytest.raises(ModelError, match="the context must be a positive number"):
        parse_hf_config(data, "m")


def test_smollm3_layers_without_rotary_embedding() -> None:
    base = {"model_type": "smollm3", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 5}
    base |= {"intermediate_size": 96, "vocab_size": 384}
    usual = parse_hf_config(base | {"no_rope_layers": None}, "m")
    assert (usual.local_layers, usual.rope.theta) == ((False, False, False, True, False), 2e6)
    every_second = parse_hf_config(base | {"no_rope_layer_interval": 2}, "m")
    assert every_second.local_layers == (False, True, False, True, False)
    assert parse_hf_config(base | {"no_rope_layers": [0, 1, 1, 1, 0, 1]}, "m").local_layers == (
        True, False, False, False, True
    )  # fmt: skip
    with pytest.raises(ModelError, match="'no_rope_layers' has 2 entries for 5 layers"):
        parse_hf_config(base | {"no_rope_layers": [0, 1]}, "m")
    with pytest.raises(UnsupportedModelError, match="'use_sliding_window' is not supported"):
        parse_hf_config(base | {"use_sliding_window": True}, "m")


@pytest.mark.parametrize(
    ("change", "activation"),
    [
        ({}, "gelu_tanh"),
        ({"hidden_act": "gelu", "hidden_activation": None}, "gelu_tanh"),  # as Gemma was released
        ({"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}, "gelu_tanh"),
        ({"hidden_act": "silu"}, "silu"),
        ({"model_type": "llama", "hidden_act": "gelu"}, None),
        ({"model_type": "gemma2"}, None),
    ],
)
def test_gelu_means_the_tanh_in_gemma_alone(change: dict[str, Any], activation: str | None) -> None:
    data = {"model_type": "gemma", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    data |= {"intermediate_size": 96, "vocab_size": 384} | change
    if activation is None:
        with pytest.raises(UnsupportedModelError, match=r"'(gelu|gemma2)' is not supported"):
            parse_hf_config(data, "m")
    else:
        assert parse_hf_config(data, "m").activation == activation


def test_qwen_window_needs_its_switch() -> None:
    base = {"model_type": "qwen2", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}
    base |= {"intermediate_size": 96, "vocab_size": 384, "sliding_window": 32, "max_window_layers": 1}
    assert parse_hf_config(base, "m").sliding_window is None
    on = parse_hf_config(base | {"use_sliding_window": True}, "m")
    assert (on.sliding_window, on.local_layers) == (32, (False, True, True))
    experts = parse_hf_config(base | {"use_sliding_window": True, "model_type": "qwen3_moe"}, "m")
    assert experts.local_layers == (True, True, True)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model_type": "mamba"}, UnsupportedModelError, "'mamba' is not supported.*llama"),
        (
            {"model_type": "mistral3", "text_config": {"model_type": "mistral4"}},
            UnsupportedModelError,
            "'mistral4' is not supported",
        ),
        (
            {"model_type": "llava", "text_config": {"model_type": "llama"}},
            UnsupportedModelError,
            "'llava' is not supported",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1.0,
                    "factor": 2.0,
                    "original_max_position_embeddings": 64,
                }
            },
            ModelError,
            "rotary base of 1.0 is too small",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedModelError, "gptq.*GGUF"),
        ({"rope_parameters": {"rope_type": "longrope"}}, UnsupportedModelError, "rope scaling 'longrope'"),
        ({"rope_scaling": {"type": "yarn", "truncate": False}}, UnsupportedModelError, "rope scaling 'yarn'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ModelError, "yarn rope scaling lacks 'original_max_pos"),
        ({"hidden_act": "relu"}, UnsupportedModelError, "activation 'relu'"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            UnsupportedModelError,
            "LlamaForSequenceClassification, which scores texts; .*ForCausalLM",
        ),
        ({"architectures": ["LlamaForRewardModel"]}, UnsupportedModelError, "which scores texts"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, UnsupportedModelError, "with and without experts"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, UnsupportedModelError, "with and without experts"),
        ({"model_type": "qwen3_moe", "num_experts": 4}, ModelError, "8 experts of 4"),
        ({"num_hidden_layers": 0}, ModelError, "num_hidden_layers.*positive"),
        ({"hidden_size": 128}, ModelError, r"shape \[.*64\].*calls for \[.*128\]"),
        ({"num_hidden_layers": 3}, ModelError, "layers.2.*missing"),
        ({"tie_word_embeddings": False}, ModelError, "lm_head.weight is missing"),
    ],
)
def test_wrong_configurations_are_rejected(
    change: dict[str, Any], error: type[ModelError], words: str, tiny: Tiny, tmp_path: Path
) -> None:
    folder = _copy(tiny("llama"), tmp_path)
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data | change))
    with pytest.raises(error, match=words) as caught:
        load_model(str(folder), dtype="int8", cache_dir=tmp_path)
    assert "\n" not in str(caught.value)


def test_bug_files_beside_the_weights_are_no_part_of_them(tiny: Tiny, tmp_path: Path) -> None:
    """An adapter that was trained with its embedding, and the index of shards that were saved there before."""
    folder = _copy(tiny("llama"), tmp_path)
    save_file({"base_model.model.model.embed_tokens.weight": torch.ones(384, 64)}, folder / "adapter_model.safetensors")
    index = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    digests = {load_model(str(each), dtype="fp32", cache_dir=tmp_path).digest for each in (folder, tiny("llama"))}
    assert len(digests) == 1


@pytest.mark.parametrize("keep", [0, 7, 100, 5000, -1])
def test_truncated_weights_are_rejected(keep: int, tiny: Tiny, tmp_path: Path) -> None:
    folder = _copy(tiny("llama"), tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"truncated or corrupt.*fetch"):
        load_model(str(folder), dtype="int8", cache_dir=tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("tensor", "role"),
    [
        ("layers.1.mlp.up_proj.weight", "layers.1.up"), ("embed_tokens.weight", "embed"),
        ("norm.weight", "final_norm"), ("layers.1.self_attn.q_proj.bias", "layers.1.q.bias"),
    ],
)  # fmt: skip
def test_weights_that_are_no_numbers_are_rejected(
    tensor: str, role: str, value: float, tiny: Tiny, tmp_path: Path
) -> None:
    folder = _copy(tiny("qwen2"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.{tensor}"].view(-1)[3] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=rf"tensor {role} holds values that are no finite numbers; fetch"):
        load_model(str(folder), dtype="int8", cache_dir=tmp_path)


def test_integer_weights_are_rejected(tiny: Tiny, tmp_path: Path) -> None:
    folder = _copy(tiny("llama"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"up_proj\.weight has type I8"):
        load_model(str(folder), dtype="int8", cache_dir=tmp_path)


def test_incomplete_folders_are_rejected(tiny: Tiny, tmp_path: Path) -> None:
    folder = _copy(tiny("llama"), tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        load_model(str(folder), dtype="int8", cache_dir=tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \.safetensors"):
        load_model(str(folder), dtype="int8", cache_dir=tmp_path)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        load_model(str(folder), dtype="int8", cache_dir=tmp_path)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_model(str(folder), dtype="int8", cache_dir=tmp_path)


def _copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "copy"))
