"""Reads a Hugging Face ``config.json`` into a `ModelConfig`, without importing transformers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from specdec.errors import ModelError, UnsupportedModelError
from specdec.models.model_config import ModelConfig, RopeConfig
from specdec.models.quantized_config import parse_quantized_config

# model_type in config.json -> family
FAMILIES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",
}

# What a family's configuration class assumes where config.json says nothing (published configs omit such fields)
_COMMON: dict[str, Any] = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    "gemma3": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def parse_hf_config(data: dict[str, Any], name: str) -> ModelConfig:
    """The model's shape from the parsed ``config.json``; ``name`` is used in messages.

    ``qkv_bias`` is what the configuration says; sources may find that tensors say otherwise.

    Raises:
        UnsupportedModelError: the family, its activation, rope scaling or quantisation is not one specdec runs.
        ModelError: a field is missing or has no sensible value.
    """
    model_type = str(data.get("model_type", "(none)"))
    family = FAMILIES.get(model_type)
    if family is None:
        known = ", ".join(sorted(set(FAMILIES.values())))
        raise UnsupportedModelError(f"{name}: model type '{model_type}' is not supported; use a model of {known}")
    if data.get("quantization_config") is not None:
        parse_quantized_config(data["quantization_config"], name)  # refused here, before any weights are looked at
    outer = data
    if "text_config" in data:  # a multimodal checkpoint: the language model's part of it
        data = {k: v for k, v in data.items() if k in ("bos_token_id", "eos_token_id", "tie_word_embeddings")}
        data |= outer["text_config"]
    # A null means "the default", but for the window: there it means that the model has none.
    said = {k: v for k, v in data.items() if v is not None or k == "sliding_window"}
    return _Reader(name, family, _COMMON | _DEFAULTS[family] | said).read()


@dataclass(frozen=True)
class _Reader:
    name: str
    family: str
    data: dict[str, Any]

    def read(self) -> ModelConfig:
        self._refuse_unsupported()
        hidden, heads, layers = (
            self._int("hidden_size"),
            self._int("num_attention_heads"),
            self._int("num_hidden_layers"),
        )
        gemma = self.family == "gemma3"
        head_dim = self._int("head_dim", hidden // heads)
        window, sliding = self._sliding(layers)
        scalar = float(self.data["query_pre_attn_scalar"]) if gemma else float(head_dim)
        return ModelConfig(
            family=self.family,
            vocab_size=self._int("vocab_size"),
            hidden_size=hidden,
            n_layers=layers,
            n_heads=heads,
            n_kv_heads=self._int("num_key_value_heads", heads),
            head_dim=head_dim,
            intermediate_size=self._int("intermediate_size"),
            max_context=self._int("max_position_embeddings"),
            norm_eps=float(self.data["rms_norm_eps"]),
            rope=self._rope(),
            attn_scale=scalar**-0.5,
            activation=self._activation(),
            embed_scale=math.sqrt(hidden) if gemma else 1.0,
            tie_embeddings=bool(self.data.get("tie_word_embeddings", False)),
            qkv_bias=bool(self.data.get("attention_bias", self.family == "qwen2")),
            qk_norm=self.family in ("qwen3", "gemma3"),
            post_norms=gemma,
            sliding_window=window,
            sliding_layers=sliding,
            bos_id=_first(self.data.get("bos_token_id")),
            eos_ids=tuple(_ids(self.data.get("eos_token_id"))),
        )

    def _refuse_unsupported(self) -> None:
        for key in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
            if self.data.get(key):
                raise UnsupportedModelError(f"{self.name}: '{key}' is not supported; use another model")

    def _int(self, key: str, default: int | None = None) -> int:
        value = self.data.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ModelError(f"{self.name}: config.json: '{key}' must be a positive integer, got {value!r}")
        return value

    def _activation(self) -> Any:
        given = self.data.get("hidden_activation") if self.family == "gemma3" else self.data.get("hidden_act")
        default = "gelu_pytorch_tanh" if self.family == "gemma3" else "silu"
        activation = _ACTIVATIONS.get(given or default)
        if activation is None:
            raise UnsupportedModelError(f"{self.name}: activation '{given}' is not supported")
        return activation

    def _sliding(self, layers: int) -> tuple[int | None, tuple[bool, ...]]:
        window = self.data.get("sliding_window")
        if self.family in ("qwen2", "qwen3") and not self.data.get("use_sliding_window", False):
            window = None
        if window is None or self.family == "llama":
            return None, (False,) * layers
        types = self.data.get("layer_types")
        if types is not None:
            if len(types) != layers:
                raise ModelError(
                    f"{self.name}: config.json: 'layer_types' has {len(types)} entries for {layers} layers"
                )
            flags = tuple(kind == "sliding_attention" for kind in types)
        elif self.family == "gemma3":
            flags = tuple((i + 1) % int(self.data["sliding_window_pattern"]) != 0 for i in range(layers))
        elif self.family == "mistral":
            flags = (True,) * layers
        else:
            flags = tuple(i >= int(self.data["max_window_layers"]) for i in range(layers))
        return (int(window) if any(flags) else None), flags

    def _rope(self) -> RopeConfig:
        """Both spellings: ``rope_parameters`` (transformers 5) and ``rope_theta`` with ``rope_scaling``."""
        given = self.data.get("rope_parameters") or {}
        if self.family == "gemma3":
            full = given.get("full_attention") or {}
            local = given.get("sliding_attention") or {}
            theta = full.get("rope_theta", self.data.get("rope_theta", 1_000_000.0))
            local_theta = local.get("rope_theta", self.data.get("rope_local_base_freq", 10_000.0))
            if _scaling(local, self.name) is not None:
                raise UnsupportedModelError(f"{self.name}: rope scaling of sliding layers is not supported")
            scaling = full if "full_attention" in given else self.data.get("rope_scaling")
            return RopeConfig(float(theta), float(local_theta), _scaling(scaling or {}, self.name))
        theta = given.get("rope_theta", self.data.get("rope_theta", 10_000.0))
        partial = given.get("partial_rotary_factor", self.data.get("partial_rotary_factor", 1.0))
        if partial != 1.0:
            raise UnsupportedModelError(f"{self.name}: partial rotary embedding is not supported")
        return RopeConfig(float(theta), None, _scaling(given or self.data.get("rope_scaling") or {}, self.name))


def _scaling(given: dict[str, Any], name: str) -> tuple[str | float, ...] | None:
    kind = given.get("rope_type", given.get("type", "default"))
    try:
        if kind == "default":
            return None
        if kind == "linear":
            return ("linear", float(given["factor"]))
        if kind == "llama3":
            fields = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            return ("llama3", *(float(given[field]) for field in fields))
    except KeyError as missing:
        raise ModelError(f"{name}: config.json: {kind} rope scaling lacks {missing}") from None
    raise UnsupportedModelError(f"{name}: rope scaling '{kind}' is not supported; remove it to run at the base context")


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(v) for v in value] if isinstance(value, list) else [int(value)]


def _first(value: Any) -> int | None:
    ids = _ids(value)
    return ids[0] if ids else None
