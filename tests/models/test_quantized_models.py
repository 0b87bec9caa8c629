"""AWQ, GPTQ and compressed-tensors folders: they load as the matrices they stand for, plain, in the CPU's blocks, which
lose nothing, and as 4-bit weights for the GPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.config import WeightDtype
from specdec.errors import ModelError, UnsupportedModelError
from specdec.models.device_weights import read_int4
from specdec.models.hf import parse_quantized_config
from specdec.models.load import load_model
from specdec.models.quantized import QuantizedSource
from specdec.models.resolve import HFCheckpoint
from tests.kernels.natives import native_backend
from tests.models.oracle_weights import differences, expected_layer, found_layer
from tests.models.quantized_folders import Scheme, change_config, quantise, quantise_folder, write_folder
from tests.models.test_decoder_oracle import make_decoder, run_in_chunks
from tests.models.tiny import VOCAB_SIZE, load_oracle, make_tiny_model
from verify_kernels.gpu.quantized_weights import unpack_int4
from verify_kernels.packed_weights import unpack_linear
from verify_kernels.reference.backend import ReferenceBackend

SCHEMES = {
    "awq": Scheme("awq"),
    "awq whole": Scheme("awq", group=-1),
    "gptq": Scheme("gptq"),
    "gptq sym": Scheme("gptq", sym=True, group=64),
    "gptq v2": Scheme("gptq", v2=True),
    "gptq act order": Scheme("gptq", act_order=True),
    "gptq 8 bits": Scheme("gptq", bits=8),
    "gptq head": Scheme("gptq", lm_head=True, group=16),
    "gptq 128": Scheme("gptq", group=128),
    "compressed": Scheme("compressed-tensors"),
    "compressed sym": Scheme("compressed-tensors", sym=True, group=128, scales=torch.bfloat16),
    "compressed channel": Scheme("compressed-tensors", sym=True, group=-1),
    "compressed act order": Scheme("compressed-tensors", act_order=True, group=64),
    "compressed 8 bits": Scheme("compressed-tensors", bits=8, group=64),
}
FOUR_BITS = [name for name in SCHEMES if not name.endswith(("8 bits", "head"))]
BLOCKS = {32: "u4_32", 64: "u4_64", 128: "u4_128", -1: "u4_128"}
DTYPES: tuple[WeightDtype, ...] = ("auto", "int8")
ROLES = ("q", "k", "v", "o", "gate", "up", "down")
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
COMPRESSED = Scheme("compressed-tensors", group=128).config


def compressed(**weights: Any) -> dict[str, Any]:
    """The configuration of a compressed-tensors folder with some fields of its weights set."""
    changed = json.loads(json.dumps(COMPRESSED))
    changed["config_groups"]["group_0"]["weights"] |= weights
    return changed


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """(quantised, plain) by scheme; tests must not write to them."""
    root = tmp_path_factory.mktemp("quantised")
    # 256 inputs in one group: more than the GPU kernel's groups hold
    wide = {"hidden_size": 128, "intermediate_size": 320}
    sizes = {"awq whole": {"intermediate_size": 256}} | {n: wide for n, s in SCHEMES.items() if s.group >= 64}
    return {
        name: write_folder(root / name.replace(" ", "_"), scheme, **sizes.get(name, {}))
        for name, scheme in SCHEMES.items()
    }


def open_source(folder: Path) -> QuantizedSource:
    source = HFCheckpoint(folder).open()
    assert isinstance(source, QuantizedSource)
    return source


@pytest.mark.parametrize("name", SCHEMES)
def test_weights_equal_the_dequantised_levels(name: str, folders: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    quantised, plain = folders[name]
    loaded = load_model(str(quantised), dtype="fp32", cache_dir=tmp_path)
    assert differences(loaded.weights, load_oracle(plain)) == []


@pytest.mark.parametrize("name", SCHEMES)
def test_blocks_are_lossless(name: str, folders: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    quantised, plain = folders[name]
    weights = load_model(str(quantised), dtype="auto", cache_dir=tmp_path).weights
    again = load_model(str(quantised), dtype="auto", cache_dir=tmp_path).weights  # from the cache
    kind = BLOCKS[SCHEMES[name].group] if name in FOUR_BITS else "int8"
    state = load_oracle(plain).state_dict()
    for i, layer in enumerate(weights.layers):
        parts = [part for each in layer.linears for part in getattr(each, "parts", (each,))]
        assert {part.kind for part in parts} == {kind}
        assert all((part.order is not None) == SCHEMES[name].act_order for part in parts)
        # the attention's matrices are ordered alike, gate and up are not
        assert [len(getattr(each, "parts", (each,))) for each in layer.linears] == [
            1,
            1,
            1 + SCHEMES[name].act_order,
            1,
        ]
        expected, found, cached = expected_layer(state, i, False), found_layer(layer), found_layer(again.layers[i])
        for matrix in ("qkv", "o", "gate_up", "down"):
            assert torch.equal(found[matrix], cached[matrix])
            assert kind == "int8" or torch.equal(found[matrix], expected[matrix]), matrix


@pytest.mark.parametrize("name", ["awq", "gptq act order", "compressed"])
def test_parts_of_fused_matrices(name: str, tmp_path: Path) -> None:
    quantised, plain = write_folder(tmp_path, SCHEMES[name], "phi3")
    loaded, kept = (load_model(str(quantised), dtype=dtype, cache_dir=tmp_path) for dtype in ("fp32", "auto"))
    assert differences(loaded.weights, load_oracle(plain)) == []
    assert [each.kind for each in kept.weights.layers[1].linears] == ["u4_32"] * 4
    for each, exact in zip(kept.weights.layers[1].linears, loaded.weights.layers[1].linears, strict=True):
        assert torch.equal(unpack_linear(each), unpack_linear(exact))


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"),
    [
        ("awq", "fp32", 1e-4),
        ("gptq act order", "fp32", 1e-4),
        *((name, "auto", 0.06) for name in ("awq", "gptq 128", "gptq act order", "compressed sym")),
    ],
)
def test_logits_equal_the_dequantised_models(
    name: str, dtype: str, tolerance: float, folders: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    quantised, plain = folders[name]
    tokens = torch.randint(0, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.no_grad():
        expected = load_oracle(plain)(torch.tensor([tokens])).logits[0]
    for backend in (native_backend(), ReferenceBackend(1)):
        got = run_in_chunks(make_decoder(quantised, tmp_path, backend, dtype), tokens, [40])
        assert torch.linalg.norm(got - expected) <= tolerance * torch.linalg.norm(expected)


def test_weights_without_exact_blocks_are_rounded_as_usual(tmp_path: Path) -> None:
    folder, _ = write_folder(tmp_path, Scheme("compressed-tensors", act_order=True, scales=torch.bfloat16))
    state = load_file(folder / "model.safetensors")
    state["model.layers.0.self_attn.o_proj.weight_scale"][3, 1] = 1e-9  # no float16 number
    state["model.layers.0.mlp.down_proj.weight_g_idx"][:] = torch.arange(128) // 43  # groups of 43, 43 and 42
    save_file(state, folder / "model.safetensors")
    source = open_source(folder)
    stored = {role: source.stored_blocks(f"layers.0.{role}") for role in ROLES}
    kinds = {role: None if found is None else found.kind for role, found in stored.items()}
    assert kinds == dict.fromkeys(ROLES, "u4_32") | {"o": None, "down": None}
    first = load_model(str(folder), dtype="auto", cache_dir=tmp_path).weights.layers[0]
    assert [getattr(each, "kind", "two") for each in first.linears] == ["u4_32", "int8", "two", "int8"]


def test_default_weights_load(folders: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    loaded = load_model(str(folders["gptq"][0]), dtype="int8", cache_dir=tmp_path)
    assert loaded.weights.layers[0].qkv.kind == "int8"


@pytest.mark.parametrize("name", SCHEMES)
def test_any_slice_is_a_slice_of_the_whole(name: str, folders: dict[str, tuple[Path, Path]]) -> None:
    source = open_source(folders[name][0])
    whole = source.rows("layers.1.gate", 0, 128)
    for low, high in ((0, 1), (3, 5), (8, 16), (7, 100), (127, 128), (64, 64)):
        assert torch.equal(source.rows("layers.1.gate", low, high), whole[low:high])


@pytest.mark.parametrize("name", FOUR_BITS)
def test_gpu_weights_are_the_same_matrices(name: str, folders: dict[str, tuple[Path, Path]]) -> None:
    source = open_source(folders[name][0])
    for role in ROLES:
        outputs, inputs = source.shape(f"layers.0.{role}")
        packed = read_int4(source, f"layers.0.{role}")
        assert (packed.n, packed.k) == (outputs, inputs)
        assert (packed.perm is not None) == SCHEMES[name].act_order
        assert torch.equal(unpack_int4(packed), source.rows(f"layers.0.{role}", 0, outputs))


def test_weights_without_a_gpu_kernel_are_named(folders: dict[str, tuple[Path, Path]]) -> None:
    with pytest.raises(UnsupportedModelError, match=r"bits is 8; .*CPU"):
        read_int4(open_source(folders["gptq 8 bits"][0]), "layers.0.q")
    with pytest.raises(UnsupportedModelError, match=r"layers.0.q: group_size is 16; .*32, 64 or 128"):
        read_int4(open_source(folders["gptq head"][0]), "layers.0.q")


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_gpu_scales_that_are_no_numbers_are_rejected(value: float, tmp_path: Path) -> None:
    folder, _ = write_folder(tmp_path, Scheme("gptq"))
    state = load_file(folder / "model.safetensors")
    state["model.layers.0.mlp.up_proj.scales"][0, 5] = value
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"tensor layers\.0\.up holds values that are no finite numbers; fetch"):
        read_int4(open_source(folder), "layers.0.up")


def test_unquantised_tensors_are_read_as_usual(folders: dict[str, tuple[Path, Path]]) -> None:
    source, plain = open_source(folders["awq"][0]), HFCheckpoint(folders["awq"][1]).open()
    assert (source.name, source.config) == ("quantised", plain.config)
    assert torch.equal(source.rows("embed", 5, 9), plain.rows("embed", 5, 9))
    assert torch.equal(source.vector("final_norm"), plain.vector("final_norm"))
    assert source.shape("embed") == plain.shape("embed")
    assert [source.has(role) for role in ("embed", "layers.0.q", "layers.0.q.bias", "lm_head")] == [
        True,
        True,
        False,
        False,
    ]


def test_a_quantised_head_is_supported(folders: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    shutil.copytree(folders["gptq head"][0], tmp_path / "m")
    data = json.loads((tmp_path / "m" / "config.json").read_text())
    del data["tie_word_embeddings"]
    (tmp_path / "m" / "config.json").write_text(json.dumps(data))
    source = open_source(tmp_path / "m")
    assert not source.config.tie_embeddings
    assert source.is_quantized("lm_head")


def test_biases_added_by_quantisers_are_kept(tmp_path: Path) -> None:
    folder, _ = write_folder(tmp_path, Scheme("gptq"))
    state = load_file(folder / "model.safetensors")
    bias = torch.randn(64, generator=torch.Generator().manual_seed(1))
    save_file(state | {"model.layers.0.self_attn.o_proj.bias": bias}, folder / "model.safetensors")
    loaded = load_model(str(folder), dtype="fp32", cache_dir=tmp_path)
    assert loaded.weights.layers[0].o.bias is not None
    assert torch.equal(loaded.weights.layers[0].o.bias[:64], bias)


def test_the_first_gptq_format_can_mean_16(tmp_path: Path) -> None:
    folder, _ = write_folder(tmp_path, Scheme("gptq"))
    state = load_file(folder / "model.safetensors")
    state["model.layers.0.mlp.up_proj.qzeros"].fill_(-1)  # 15 everywhere, and one more is 16
    save_file(state, folder / "model.safetensors")
    source = open_source(folder)
    assert bool((source.matrix("layers.0.up", 0, 128).zeros == 16).all())
    assert torch.equal(unpack_int4(read_int4(source, "layers.0.up")), source.rows("layers.0.up", 0, 128))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported; .*GGUF"),
        ({}, "quant_method None"),
        (["gptq"], "quant_method None"),
        (GPTQ | {"bits": 3}, r"\(gptq\): bits 3 is not supported; only 4 or 8 is"),
        (AWQ | {"bits": 8}, r"\(awq\): bits 8 is not supported; only 4 is"),
        (GPTQ | {"group_size": 0}, "group_size is 0"),
        (AWQ | {"group_size": None}, "group_size is None"),
        (AWQ | {"version": "gemv"}, "version 'gemv' is not supported; only gemm"),
        (AWQ | {"zero_point": False}, "zero_point False"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported; only gptq or gptq_v2"),
        (GPTQ | {"is_marlin_format": True}, "checkpoint_format 'marlin'"),
        (GPTQ | {"dynamic": {"-:.*down.*": {}}}, "dynamic"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype 'int16'"),
        (COMPRESSED | {"format": "float-quantized"}, "format 'float-quantized' is not supported; only pack-quantized"),
        (
            COMPRESSED | {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}},
            r"\(compressed-tensors\): transform_config is not supported; .*GGUF",
        ),
        (
            COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config.format 'sparse-24-bitmask' is not supported; only dense is, .*GGUF",
        ),
        (COMPRESSED | {"sparsity_config": "sparse"}, "sparsity_config.format 'sparse' is not supported; only dense is"),
        (compressed(num_bits=3), r"\(compressed-tensors\): bits 3 is not supported; only 4 or 8 is"),
        (compressed(type="float"), "type 'float' is not supported"),
        (compressed(strategy="block"), "strategy 'block' is not supported; only group or channel is, .*GGUF"),
        (COMPRESSED | {"config_groups": {}}, "config_groups must give one way"),
        (COMPRESSED | {"config_groups": ["W4A16"]}, "config_groups must give one way"),
        (
            COMPRESSED
            | {
                "config_groups": COMPRESSED["config_groups"]
                | {"b": {"weights": {"num_bits": 8, "strategy": "channel"}}}
            },
            "config_groups must give one way",
        ),
    ],
)
def test_unsupported_layouts_are_named(config: Any, words: str, folders: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        parse_quantized_config(config, "m")
    shutil.copytree(folders["gptq"][0], tmp_path / "m")
    change_config(tmp_path / "m", config)
    with pytest.raises(UnsupportedModelError, match=words):
        load_model(str(tmp_path / "m"), dtype="int8", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("config", "offset"),
    [
        (GPTQ, 1),
        (GPTQ | {"checkpoint_format": "gptq", "dynamic": {}, "pack_dtype": "int32"}, 1),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, 0),
        (GPTQ | {"format": "gptq_v2"}, 0),
        (AWQ | {"version": "GEMM"}, 0),
        (AWQ | {"format": "gemm", "zero_point": True}, 0),
        (COMPRESSED, 0),
        (compressed(actorder="static", symmetric=True), 0),
    ],
)
def test_supported_layouts(config: dict[str, Any], offset: int) -> None:
    parsed = parse_quantized_config(config, "m")
    assert (parsed.zero_offset, parsed.bits, parsed.group_size) == (offset, 4, 128)


@pytest.mark.parametrize(
    ("scheme", "part", "words"),
    [
        (Scheme("gptq"), "qweight", "q_proj.weight is missing"),
        (Scheme("awq"), "qzeros", "q_proj.qzeros is missing"),
        (Scheme("gptq"), "scales", "q_proj.scales is missing"),
        (Scheme("gptq", act_order=True), "g_idx", "q_proj.g_idx is missing; .*fetch it again"),
        (Scheme("compressed-tensors"), "weight_packed", "q_proj.weight is missing"),
        (Scheme("compressed-tensors"), "weight_zero_point", "q_proj.weight_zero_point is missing; .*fetch it again"),
        (Scheme("compressed-tensors", sym=True), "weight_scale", "q_proj.weight_scale is missing"),
        (Scheme("compressed-tensors", act_order=True), "weight_g_idx", "q_proj.weight_g_idx is missing"),
    ],
)
def test_missing_parts_are_named(scheme: Scheme, part: str, words: str, tmp_path: Path) -> None:
    folder, _ = write_folder(tmp_path, scheme)
    state = load_file(folder / "model.safetensors")
    del state[f"model.layers.0.self_attn.q_proj.{part}"]
    save_file(state, folder / "model.safetensors")
    for dtype in DTYPES:
        with pytest.raises(ModelError, match=words):
            load_model(str(folder), dtype=dtype, cache_dir=tmp_path)


@pytest.mark.parametrize("dtype", ["fp32", "auto"])
def test_groups_that_were_never_set_are_in_order(dtype: WeightDtype, tmp_path: Path) -> None:
    """compressed-tensors saves them as -1, their initial value, if the channels were not reordered."""
    folder, plain = write_folder(tmp_path, Scheme("compressed-tensors", sym=True))
    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if name.endswith("weight_packed")]:
        unset = torch.full((8 * state[name].shape[1],), -1, dtype=torch.int32)
        state[name.replace("weight_packed", "weight_g_idx")] = unset
    save_file(state, folder / "model.safetensors")
    weights = load_model(str(folder), dtype=dtype, cache_dir=tmp_path).weights
    if dtype == "fp32":
        assert differences(weights, load_oracle(plain)) == []
    else:
        assert torch.equal(
            found_layer(weights.layers[0])["qkv"], expected_layer(load_oracle(plain).state_dict(), 0, False)["qkv"]
        )


def test_inconsistent_parts_of_a_compressed_folder_are_named(tmp_path: Path) -> None:
    folder, _ = write_folder(tmp_path, Scheme("compressed-tensors", act_order=True))
    good = load_file(folder / "model.safetensors")
    q = "model.layers.0.self_attn.q_proj."
    zeros, scales = good[q + "weight_zero_point"], good[q + "weight_scale"]
    bad: list[tuple[str, Any, str]] = [
        ("weight_scale", scales[:, :1], r"q_proj.weight_scale has shape \[64, 1\]; .*group_size 32 call for \[64, 2\]"),
        ("weight_zero_point", zeros[:3], r"q_proj.weight_zero_point has shape \[3, 2\]; .*call for \[8, 2\]"),
        ("weight_zero_point", zeros.t(), r"q_proj.weight_zero_point has shape \[2, 8\]"),
        ("weight_g_idx", good[q + "weight_g_idx"] - 1, "q_proj.weight_g_idx names groups beyond the 2 there are"),
        ("weight_packed", good[q + "weight_packed"][0], "q_proj.weight_packed has shape .*; must be a matrix"),
    ]
    for part, tensor, message in bad:
        save_file(good | {q + part: tensor.contiguous()}, folder / "model.safetensors")
        for dtype in DTYPES:
            with pytest.raises(ModelError, match=message):
                load_model(str(folder), dtype=dtype, cache_dir=tmp_path)


def test_inconsistent_parts_are_named(tmp_path: Path) -> None:
    folder, _ = write_folder(tmp_path, Scheme("gptq"))
    good = load_file(folder / "model.safetensors")
    q = "model.layers.0.self_attn.q_proj."
    bad: list[tuple[str, Any, str]] = [
        ("scales", good[q + "scales"][:1], r"q_proj.scales has shape \[1, 64\]; .*group_size 32 call for \[2, 64\]"),
        ("qzeros", good[q + "qzeros"][:, :3].contiguous(), "q_proj.qzeros has shape"),
        ("g_idx", good[q + "g_idx"][:5].contiguous(), "q_proj.g_idx has shape"),
        ("g_idx", good[q + "g_idx"] + 1, "q_proj.g_idx names groups beyond the 2 there are"),
        ("qweight", good[q + "qweight"][0], "q_proj.qweight has shape .*; must be a matrix"),
    ]
    for part, tensor, words in bad:
        save_file(good | {q + part: tensor}, folder / "model.safetensors")
        for dtype in DTYPES:
            with pytest.raises(ModelError, match=words):
                load_model(str(folder), dtype=dtype, cache_dir=tmp_path)
    save_file(good | {q + "g_idx": torch.zeros(64, dtype=torch.int32)}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="g_idx has groups of unequal sizes"):
        read_int4(open_source(folder), "layers.0.q")


def test_the_writer_quantises() -> None:
    """The tests' own quantiser is close to its input, so that its models are not noise."""
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(5)).numpy()
    for scheme, bound in ((Scheme("awq"), 0.2), (Scheme("gptq", act_order=True), 0.2), (Scheme("gptq", bits=8), 0.02)):
        _, matrix = quantise(weight, scheme, 1)
        assert abs(matrix - weight).mean() < bound * abs(weight).mean()


@pytest.mark.parametrize("act_order", [False, True])
def test_experts_of_a_quantised_folder(act_order: bool, tmp_path: Path) -> None:
    """One matrix holds all experts, so an order of each one's own is not kept; int4 rounds to four bits then."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 128}
    plain, folder = (make_tiny_model("qwen3_moe", tmp_path / name, **sizes) for name in ("plain", "quantised"))
    quantise_folder(plain, folder, Scheme("gptq", act_order=act_order))
    exact = load_model(str(folder), dtype="fp32", cache_dir=tmp_path)
    assert differences(exact.weights, load_oracle(plain)) == []
    kinds = {}
    for dtype in ("auto", "int4"):
        layer = load_model(str(folder), dtype=dtype, cache_dir=tmp_path).weights.layers[0]  # type: ignore[arg-type]
        kinds[dtype] = {getattr(layer, name).kind for name in ("gate_up", "down")}
    kept = {BLOCKS[Scheme("gptq").group]}
    assert kinds == {"auto": {"int8"} if act_order else kept, "int4": {"q4_0"} if act_order else kept}


def test_experts_with_a_bias_are_rejected(tmp_path: Path) -> None:
    folder = make_tiny_model("qwen3_moe", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.experts.0.up_proj.bias"] = torch.ones(48)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match="m: experts with a bias are not supported"):
        load_model(str(folder), dtype="int8", cache_dir=tmp_path)
