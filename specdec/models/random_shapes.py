"""Shapes of models that can be run with random weights: for speed, what matters is the shape."""

from __future__ import annotations

from dataclasses import replace

from specdec.models.model_config import ModelConfig, RopeConfig

_LLAMA = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    n_layers=32,
    n_heads=32,
    n_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    max_context=131072,
    norm_eps=1e-5,
    rope=RopeConfig(500_000.0, None, ("llama3", 8.0, 1.0, 4.0, 8192.0)),
    attn_scale=128**-0.5,
)
_QWEN = ModelConfig(
    family="qwen2",
    vocab_size=152064,
    hidden_size=3584,
    n_layers=28,
    n_heads=28,
    n_kv_heads=4,
    head_dim=128,
    intermediate_size=18944,
    max_context=32768,
    norm_eps=1e-6,
    rope=RopeConfig(1_000_000.0),
    attn_scale=128**-0.5,
    qkv_bias=True,
)

# As the models' own config.json files have them; tiny is for tests.
RANDOM_SHAPES: dict[str, ModelConfig] = {
    "llama-3.1-8b": _LLAMA,
    "qwen2.5-coder-1.5b": replace(
        _QWEN,
        vocab_size=151936,
        hidden_size=1536,
        n_heads=12,
        n_kv_heads=2,
        intermediate_size=8960,
        tie_embeddings=True,
    ),
    "qwen2.5-coder-7b": _QWEN,
    "qwen2.5-coder-32b": replace(
        _QWEN, hidden_size=5120, n_layers=64, n_heads=40, n_kv_heads=8, intermediate_size=27648
    ),
    "tiny": replace(
        _QWEN,
        vocab_size=384,
        hidden_size=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=64,  # the least that a GPU's kernels know
        intermediate_size=160,
        max_context=2048,
        attn_scale=64**-0.5,
    ),
}
