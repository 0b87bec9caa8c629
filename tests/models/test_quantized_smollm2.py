"""SmolLM2's own weights, rounded to 4 bits in the three layouts of Hugging Face folders, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specdec.config import EngineConfig
from specdec.models.catalogue import DEFAULT_MODEL
from specdec.models.load import load_model
from specdec.models.progress import silent
from specdec.models.resolve import load_tokenizer, resolve
from specdec.models.weights import linear_plans
from tests.kernels.natives import native_backend
from tests.models.oracle_weights import expected_layer, found_layer
from tests.models.quantized_folders import Scheme, quantise_folder
from tests.models.test_decoder_oracle import make_decoder, run_in_chunks
from tests.models.tiny import load_oracle, make_tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.model]

TEXT = (
    "Speculative decoding lets a small model propose several tokens, which the large one checks in a single pass. "
    "def read(path):\n    with open(path) as file:\n        return [line.strip() for line in file]\n"
)
SCHEMES = {
    "gptq act order": Scheme("gptq", group=128, act_order=True),  # 576 inputs: the last group has 64
    "gptq sym": Scheme("gptq", group=32, sym=True),
    "awq": Scheme("awq", group=64),
    "compressed": Scheme("compressed-tensors", group=128, sym=True, scales=torch.bfloat16),
}
NAMES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
    "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
}  # fmt: skip


def _write_smollm2(folder: Path) -> None:
    """The default model as a Hugging Face folder, with a tokenizer that is not its own."""
    from transformers import LlamaConfig

    source = resolve(DEFAULT_MODEL, EngineConfig().cache_dir.expanduser(), silent).open()
    c = source.config
    LlamaConfig(
        architectures=["LlamaForCausalLM"], vocab_size=c.vocab_size, hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size, num_hidden_layers=c.n_layers, num_attention_heads=c.n_heads,
        num_key_value_heads=c.n_kv_heads, max_position_embeddings=c.max_context, rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta}, tie_word_embeddings=True,
    ).save_pretrained(folder)  # fmt: skip
    state = {"model.embed_tokens.weight": source.rows("embed", 0, c.vocab_size)}
    state["model.norm.weight"] = source.vector("final_norm")
    for plan in linear_plans(c)[:-1]:
        for role, rows in plan.parts:
            _, layer, part = role.split(".")
            state[f"model.layers.{layer}.{NAMES[part]}.weight"] = source.rows(role, 0, rows)
    for i in range(c.n_layers):
        for norm in ("attn_norm", "mlp_norm"):
            state[f"model.layers.{i}.{NAMES[norm]}.weight"] = source.vector(f"layers.{i}.{norm}")
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    make_tiny_tokenizer(folder)


@pytest.mark.parametrize("name", SCHEMES)
def test_logits_and_weights_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Weights bit for bit; logits within 4 %, the error of int8 activations."""
    plain, quantised = tmp_path / "plain", tmp_path / "quantised"
    for folder in (plain, quantised):
        folder.mkdir()
        _write_smollm2(folder)
    quantise_folder(plain, quantised, SCHEMES[name])
    tokens = load_tokenizer(DEFAULT_MODEL, EngineConfig().cache_dir).encode(TEXT)
    oracle = load_oracle(plain)
    with torch.no_grad():
        expected = oracle(torch.tensor([tokens])).logits[0]
    state = oracle.state_dict()
    for i, layer in enumerate(load_model(str(quantised), dtype="auto", cache_dir=tmp_path).weights.layers):
        found, wanted = found_layer(layer), expected_layer(state, i, False)
        assert all(torch.equal(found[each], wanted[each]) for each in wanted), i
    got = run_in_chunks(make_decoder(quantised, tmp_path, native_backend(), "auto"), tokens, [len(tokens)])
    error = float((got - expected).norm() / expected.norm())
    same = float((got.argmax(-1) == expected.argmax(-1)).float().mean())
    print(f"{name}: {error:.4f} of the logits' norm, top-1 {same:.3f}")
    assert error < 0.04
    assert same > 0.9
