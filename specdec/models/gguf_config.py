"""Reads GGUF metadata into a `ModelConfig`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from specdec.errors import ModelError, UnsupportedModelError
from specdec.models.gguf_file import GGUFFile
from specdec.models.model_config import ModelConfig, RopeConfig

# general.architecture -> family; Mistral models are stored as `llama` too
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3"}

_GEMMA_PATTERN = 6  # every sixth layer is global; files do not always say so
_GEMMA_LOCAL_THETA = 10_000.0
_GEMMA_27B_LAYERS = 62  # the one size whose attention scale is hidden / heads instead of head_dim


def parse_gguf_config(file: GGUFFile) -> ModelConfig:
    """The model's shape from metadata and tensor shapes; token ids are left to the tokenizer.

    Raises:
        UnsupportedModelError: the architecture, or an option of it, is not one specdec runs.
        ModelError: a field is missing or makes no sense.
    """
    architecture = str(file.metadata.get("general.architecture", "(none)"))
    if architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedModelError(
            f"{file.path}: GGUF architecture '{architecture}' is not supported; use a model of {known}"
        )
    return _Reader(file, architecture).read()


@dataclass(frozen=True)
class _Reader:
    file: GGUFFile
    architecture: str

    def read(self) -> ModelConfig:
        if int(self._get("expert_count", 0)) > 0:
            raise UnsupportedModelError(f"{self.file.path}: mixture-of-experts models are not supported")
        if "token_embd.weight" not in self.file.tensors:
            raise ModelError(f"{self.file.path}: tensor token_embd.weight is missing; the file is incomplete")
        gemma = self.architecture == "gemma3"
        hidden, heads, layers = (
            self._int("embedding_length"),
            self._int("attention.head_count"),
            self._int("block_count"),
        )
        head_dim = self._int("attention.key_length", hidden // heads)
        if self._int("attention.value_length", head_dim) != head_dim or self._int(
            "rope.dimension_count", head_dim
        ) not in (head_dim, hidden // heads):
            raise UnsupportedModelError(f"{self.file.path}: keys, values and rotary part must have equal lengths")
        window, sliding = self._sliding(layers)
        scale_dim = hidden / heads if gemma and layers == _GEMMA_27B_LAYERS else head_dim
        return ModelConfig(
            family=ARCHITECTURES[self.architecture],
            vocab_size=self.file.tensors["token_embd.weight"].shape[0],
            hidden_size=hidden,
            n_layers=layers,
            n_heads=heads,
            n_kv_heads=self._int("attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate_size=self._int("feed_forward_length"),
            max_context=self._int("context_length"),
            norm_eps=float(self._get("attention.layer_norm_rms_epsilon", 1e-6)),
            rope=self._rope(),
            attn_scale=float(scale_dim) ** -0.5,
            activation="gelu_tanh" if gemma else "silu",
            embed_scale=math.sqrt(hidden) if gemma else 1.0,
            tie_embeddings="output.weight" not in self.file.tensors,
            qkv_bias="blk.0.attn_q.bias" in self.file.tensors,
            qk_norm="blk.0.attn_q_norm.weight" in self.file.tensors,
            post_norms=gemma,
            sliding_window=window,
            sliding_layers=sliding,
        )

    def _get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def _int(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:  # given per layer, all equal
            value = value[0]
        if isinstance(value, list):
            raise UnsupportedModelError(f"{self.file.path}: '{key}' differs between layers, which is not supported")
        if not isinstance(value, int) or value <= 0:
            raise ModelError(
                f"{self.file.path}: metadata '{self.architecture}.{key}' must be a positive integer, got {value!r}"
            )
        return value

    def _sliding(self, layers: int) -> tuple[int | None, tuple[bool, ...]]:
        window = self._get("attention.sliding_window")
        if not window:
            return None, (False,) * layers
        if self.architecture != "gemma3":
            return int(window), (True,) * layers
        pattern = self._get("attention.sliding_window_pattern", _GEMMA_PATTERN)
        if isinstance(pattern, list):
            return int(window), tuple(bool(flag) for flag in pattern)
        return int(window), tuple((i + 1) % int(pattern) != 0 for i in range(layers))

    def _rope(self) -> RopeConfig:
        gemma = self.architecture == "gemma3"
        theta = float(self._get("rope.freq_base", 1_000_000.0 if gemma else 10_000.0))
        local = float(self._get("rope.freq_base_swa", _GEMMA_LOCAL_THETA)) if gemma else None
        return RopeConfig(theta, local, self._rope_scaling())

    def _rope_scaling(self) -> tuple[str | float, ...] | None:
        if "rope_freqs.weight" in self.file.tensors:
            factors = self.file.rows("rope_freqs.weight", slice(None)).reshape(-1)
            return ("factors", *(float(factor) for factor in factors))
        kind = self._get("rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind == "linear":
            return ("linear", float(self._get("rope.scaling.factor", 1.0)))
        raise UnsupportedModelError(f"{self.file.path}: rope scaling '{kind}' is not supported")
