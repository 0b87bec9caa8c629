"""The decoder against transformers: logits of every family, in fp32, by chunked prefill and by single steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.models.decoder import Decoder, KvPool
from specdec.models.load import load_model
from tests.kernels.natives import native_backend
from tests.models.tiny import FAMILIES, VOCAB_SIZE, make_tiny_model
from verify_kernels.backend import Backend
from verify_kernels.forward_batch import BatchEntry, ForwardBatch
from verify_kernels.reference.backend import ReferenceBackend

LENGTH = 150


def make_decoder(
    folder: Path, cache: Path, backend: Backend, dtype: str = "fp32", kv_dtype: torch.dtype = torch.float32
) -> Decoder:
    model = load_model(str(folder), dtype=dtype, cache_dir=cache)  # type: ignore[arg-type]
    pool = KvPool(model.config, 8, kv_dtype)
    return Decoder(model.config, model.weights, backend, pool, max_rows=64, max_logit_rows=64, max_positions=256)


def run_in_chunks(decoder: Decoder, tokens: list[int], sizes: list[int]) -> torch.Tensor:
    """Logits of every position, fed in chunks of the given sizes (the last repeats)."""
    pages = [5, 2, 7]
    done, out = 0, []
    while done < len(tokens):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        chunk = tokens[done : done + size]
        batch = ForwardBatch.build([BatchEntry(chunk, list(range(-1, len(chunk) - 1)), done, pages)])
        out.append(decoder.forward(batch, range(len(chunk))).clone())
        done += len(chunk)
    return torch.cat(out)


def check_logits(decoder: Decoder, folder: Path, sizes: list[int]) -> None:
    """Check the logits of a random text, fed in chunks of ``sizes``, against those of transformers."""
    tokens = torch.randint(0, VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = oracle(torch.tensor([tokens])).logits[0]
    got = run_in_chunks(decoder, tokens, sizes)
    assert torch.linalg.norm(got - expected) <= 1e-4 * torch.linalg.norm(expected)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend_name", ["native", "reference"])
def test_logits_equal_transformers(family: str, backend_name: str, tmp_path: Path) -> None:
    folder = make_tiny_model(family, tmp_path / family)
    backend = native_backend() if backend_name == "native" else ReferenceBackend(1)
    decoder = make_decoder(folder, tmp_path / "cache", backend)
    check_logits(decoder, folder, [1, 63, 20])


@pytest.mark.parametrize(
    "given",
    [
        {"factor": 4.0, "original_max_position_embeddings": 64},
        {"factor": 8.0, "original_max_position_embeddings": 40, "beta_fast": 8.0, "beta_slow": 0.5},
        {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.3},
        {"factor": 40.0, "original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.3},
        {"factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7},
        {"factor": 4.0, "rope_type": "linear"},
    ],
)
def test_rope_scaling_equals_transformers(given: dict[str, Any], tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "rope_theta": 10000.0, **given}
    folder = make_tiny_model("qwen3", tmp_path / "m", rope_parameters=scaling, head_dim=64)
    decoder = make_decoder(folder, tmp_path / "cache", native_backend())
    check_logits(decoder, folder, [64])


def test_linear_scaling_of_global_layers_equals_transformers(tmp_path: Path) -> None:
    """As in Gemma 3 from 4B on."""
    layers = {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}}
    layers["sliding_attention"] = {"rope_type": "default", "rope_theta": 1e4}
    folder = make_tiny_model("gemma3", tmp_path / "m", rope_parameters=layers)
    check_logits(make_decoder(folder, tmp_path / "cache", native_backend()), folder, [64])


FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.7, 2.3, 3.0], "long_factor": [1.0] * 6}


@pytest.mark.parametrize(
    ("scaling", "sizes"),
    [
        ({"type": "longrope", **FACTORS}, {}),
        ({"type": "longrope", **FACTORS}, {"max_position_embeddings": 512}),
        ({"rope_type": "longrope", "factor": 3.0, **FACTORS}, {}),
        (None, {"partial_rotary_factor": 0.5, "sliding_window": 40}),
        (None, {"partial_rotary_factor": 1.0, "num_key_value_heads": 4, "head_dim": 20}),
    ],
)
def test_phi_equals_transformers(scaling: dict[str, Any] | None, sizes: dict[str, Any], tmp_path: Path) -> None:
    """Configurations as Phi-3 to Phi-4-mini are published with them."""
    folder = make_tiny_model("phi3", tmp_path / "m", **{"rope_parameters": None, "rope_scaling": scaling} | sizes)
    config = json.loads((folder / "config.json").read_text()) | sizes
    rope = config.pop("rope_parameters")
    config |= {"rope_scaling": scaling, "rope_theta": rope["rope_theta"]}
    config |= {"partial_rotary_factor": rope["partial_rotary_factor"], "original_max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config))
    decoder = make_decoder(folder, tmp_path / "cache", native_backend())
    check_logits(decoder, folder, [64])
    assert decoder.config.max_context == (2048 if scaling is None else 512)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8], ids=str)
def test_backends_round_the_cache_alike(family: str, kv_dtype: torch.dtype, tmp_path: Path) -> None:
    """Their logits differ by the few values so close to the middle of two that sums in another order round to the other
    one: a tenth of the effect of rounding all of them."""
    folder = make_tiny_model(family, tmp_path / family)
    tokens = torch.randint(0, VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()
    exact, native, reference = (
        run_in_chunks(make_decoder(folder, tmp_path / "cache", backend, kv_dtype=dtype), tokens, [64])
        for backend, dtype in (
            (native_backend(), torch.float32), (native_backend(), kv_dtype), (ReferenceBackend(1), kv_dtype)
        )
    )  # fmt: skip
    size = torch.linalg.norm(exact)
    assert torch.linalg.norm(native - reference) / size <= 7e-4
    assert 2e-3 <= torch.linalg.norm(native - exact) / size <= 2e-2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("int8", torch.bfloat16), ("bf16", torch.int8), ("fp32", torch.float32)], ids=str
)
def test_chunks_do_not_change_bits(family: str, dtype: str, kv_dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make_tiny_model(family, tmp_path / family)
    tokens = torch.randint(0, VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(4)).tolist()
    decoder = make_decoder(folder, tmp_path / "cache", native_backend(), dtype, kv_dtype)
    one_by_one = run_in_chunks(decoder, tokens, [1])
    assert torch.equal(run_in_chunks(decoder, tokens, [64]), one_by_one)
    assert torch.equal(run_in_chunks(decoder, tokens, [3, 61, 7]), one_by_one)


def test_bad_batches_are_rejected(tmp_path: Path) -> None:
    decoder = make_decoder(make_tiny_model("llama", tmp_path / "m"), tmp_path / "cache", native_backend())

    def run(tokens: list[int], ctx: int, pages: list[int]) -> None:
        parents = list(range(-1, len(tokens) - 1))
        decoder.forward(ForwardBatch.build([BatchEntry(tokens, parents, ctx, pages)]), [])

    with pytest.raises(ValueError, match="tokens"):
        run([VOCAB_SIZE], 0, [0])
    with pytest.raises(ValueError, match="tokens"):
        run([-1], 0, [0])
    with pytest.raises(ValueError, match="page_table"):
        run([1], 0, [8])
    with pytest.raises(ValueError, match="position"):
        run([1], 256, [0, 1, 2, 3, 4])
    with pytest.raises(ValueError, match="rows"):
        run([1] * 65, 0, [0, 1])
