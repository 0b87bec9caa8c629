"""The shape of a decoder-only transformer, independent of where it was read from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MAX_LAYERS = 1024  # a file that says more than several times what the largest models have is damaged


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding, half-split (rotate_half) convention.

    ``theta`` is the base for full-attention layers, ``local_theta`` for sliding-window layers where the family
    has its own (Gemma 3), else None. ``scaling`` None or one of: ("linear", factor) or
    ("llama3", factor, low_freq_factor, high_freq_factor, original_context) or
    ("factors", f_0, ..., f_{head_dim/2 - 1}): frequency i is divided by f_i (GGUF files hold llama3 scaling so).
    Scaling never applies to layers that use ``local_theta``.
    """

    theta: float
    local_theta: float | None = None
    scaling: tuple[str | float, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and numerics of a model.

    ``sliding_layers[i]`` tells whether layer i attends only to the last ``sliding_window`` positions
    (a key at position j is seen from position p iff p - j < sliding_window).
    ``post_norms``: Gemma's extra norms on the attention and MLP outputs before the residual add.
    ``attn_scale`` multiplies q.k; ``embed_scale`` multiplies embeddings.
    ``output_size``: rows of an output table that holds some of the vocabulary only.
    Norm weights are stored so that y = x / rms(x) * w in every family (loaders add Gemma's +1).
    """

    family: str
    vocab_size: int
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_context: int
    norm_eps: float
    rope: RopeConfig
    attn_scale: float
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embed_scale: float = 1.0
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    output_size: int | None = None
    bos_id: int | None = None
    add_bos: bool = False
    eos_ids: tuple[int, ...] = ()

    @property
    def q_size(self) -> int:
        """Columns of the query projection."""
        return self.n_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of the key (and of the value) projection."""
        return self.n_kv_heads * self.head_dim
