"""Tiny random models of every family, made with transformers: the oracle's weights, in real files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

FAMILIES = (
    "llama", "llama3", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma3", "granite", "smollm3", "seed_oss",
    "ministral3", "phi3", "mixtral", "granitemoe",
)  # fmt: skip
VOCAB_SIZE = 384
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TEXT = [
    "The quick brown fox jumps over the lazy dog, and then it does so again and again.",
    "def add(first, second):\n    return first + second\n\nfor i in range(10):\n    print(add(i, i))\n",
    "When in the course of human events it becomes necessary to read the other one, one does.",
]
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GRANITE: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.22,
    "logits_scaling": 1.7,
    "rms_norm_eps": 0.01,
    "tie_word_embeddings": True,
}
_PER_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "llama3": {"rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": False},
    "mistral": {"sliding_window": 24, "head_dim": 16},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "qwen3_moe": {
        "head_dim": 32,
        "moe_intermediate_size": 48,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "gemma": {"head_dim": 32, "hidden_act": "gelu"},
    "granite": _GRANITE,
    "granitemoe": {**_GRANITE, "num_local_experts": 7, "num_experts_per_tok": 3},
    "smollm3": {"num_hidden_layers": 5, "no_rope_layers": [1, 0, 1, 1, 0]},
    "mixtral": {"num_local_experts": 5, "head_dim": 16, "sliding_window": 24},
    "seed_oss": {"head_dim": 24},
    "ministral3": {
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "phi3": {
        "max_position_embeddings": 2048,
        "original_max_position_embeddings": 512,
        "partial_rotary_factor": 0.75,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "attention_factor": 1.125,
            "short_factor": [1.0, 1.25, 1.5, 1.75, 2.0, 2.5],
            "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 512,
        },
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "head_dim": 32,
        "num_hidden_layers": 4,
        "sliding_window": 24,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    },
}


def make_tiny_model(family: str, folder: Path, **overrides: Any) -> Path:
    """Save a tiny random model of ``family`` (one of `FAMILIES`) with a byte-level BPE tokenizer to ``folder``.

    ``overrides`` go to the configuration class; ``seed`` (default 0) seeds the weights, ``dtype`` (default
    float32) is the stored type, ``max_shard_size`` splits the file. Norms and biases are random too, so that
    a loader which drops one is caught.
    """
    seed = overrides.pop("seed", 0)
    dtype = overrides.pop("dtype", torch.float32)
    shard = overrides.pop("max_shard_size", "1GB")
    model = _build(family, seed, overrides).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    make_tiny_tokenizer(folder, model.config.vocab_size)
    return folder


def make_tiny_tokenizer(folder: Path, vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train a byte-level BPE tokenizer and save it with the ChatML template as HF files in ``folder``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=max(vocab_size, 256 + len(SPECIALS)),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 4, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[0],
        "eos_token": SPECIALS[2],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer


def load_oracle(folder: Path) -> Any:
    """The transformers model of ``folder`` in float32, for comparing."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _build(family: str, seed: int, overrides: dict[str, Any]) -> Any:
    import transformers as hf

    classes = {
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM),
        "llama3": (hf.LlamaConfig, hf.LlamaForCausalLM),
        "mistral": (hf.MistralConfig, hf.MistralForCausalLM),
        "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM),
        "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM),
        "qwen3_moe": (hf.Qwen3MoeConfig, hf.Qwen3MoeForCausalLM),
        "gemma": (hf.GemmaConfig, hf.GemmaForCausalLM),
        "gemma3": (hf.Gemma3TextConfig, hf.Gemma3ForCausalLM),
        "granite": (hf.GraniteConfig, hf.GraniteForCausalLM),
        "granitemoe": (hf.GraniteMoeConfig, hf.GraniteMoeForCausalLM),
        "mixtral": (hf.MixtralConfig, hf.MixtralForCausalLM),
        "phi3": (hf.Phi3Config, hf.Phi3ForCausalLM),
        "smollm3": (hf.SmolLM3Config, hf.SmolLM3ForCausalLM),
        "seed_oss": (hf.SeedOssConfig, hf.SeedOssForCausalLM),
        "ministral3": (hf.Ministral3Config, hf.Ministral3ForCausalLM),
    }
    config_class, model_class = classes[family]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config_class(**(_COMMON | _PER_FAMILY[family] | overrides)))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or name.endswith("bias"):
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()
