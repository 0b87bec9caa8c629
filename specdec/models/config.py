"""The shape of a decoder-only transformer, independent of where it was read from."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

MAX_EXPERTS = 1024  # of a layer; several times those of the largest models
MAX_LAYERS = 1024  # layers; several times those of the largest models, so a file with more is damaged


def _check_positive(what: str, *values: float) -> None:
    for value in values:
        if not 0 < value < math.inf:
            raise ValueError(f"{what} must be a positive number, got {value}")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding, half-split (rotate_half) convention. Numbers that are not positive raise ValueError."""

    theta: float
    """Base of full-attention layers."""
    local_theta: float | None = None
    """Base of local layers if the family has another one (Gemma 3). `scaling` does not apply to them."""
    scaling: tuple[str | float, ...] | None = None
    """("linear", factor), ("llama3", factor, low_freq_factor, high_freq_factor, original_context), or ("factors", f_0,
    ..., f_{head_dim/2 - 1}): frequency i is divided by f_i, as GGUF files hold llama3 scaling; or ("yarn", factor,
    original_context, beta_fast, beta_slow, magnitude of q and of k); or ("longrope", original_context, f_0, ...,
    magnitude of q and of k), with the factors f_i of the original context."""
    local_rotates: bool = True
    """Whether local layers have rotary embedding; those of SmolLM3 have none."""
    rotated: int | None = None
    """Channels of a head that are rotated, the first ones of each half; None: all."""

    @property
    def kinds(self) -> tuple[bool, ...]:
        """The kinds of layers that have rotary tables of their own: False for global ones, True for local ones."""
        return (False,) if self.local_theta is None and self.local_rotates else (False, True)

    @property
    def original_context(self) -> int:
        """Tokens for which the model was made before "yarn" or "longrope"; 0 for other scaling."""
        kind, *values = self.scaling or ("none",)
        return int(values[1]) if kind == "yarn" else int(values[0]) if kind == "longrope" else 0

    def max_context(self, given: int) -> int:
        """Tokens that are served of a model whose configuration says ``given``: all that "yarn" is made for, but only
        the original context of "longrope", beyond which other factors hold for all tokens."""
        kind, *values = self.scaling or ("none",)
        if kind == "longrope":
            return min(given, self.original_context)
        return max(given, int(float(values[0]) * self.original_context)) if kind == "yarn" else given

    def __post_init__(self) -> None:
        _check_positive("a rotary base", self.theta, self.theta if self.local_theta is None else self.local_theta)
        _check_positive("rope scaling", *(float(each) for each in (self.scaling or ())[1:]))
        kind, *values = self.scaling or ("none",)
        if kind == "yarn" and self.theta <= 1:
            raise ValueError(f"a rotary base of {self.theta} is too small for yarn")
        if kind == "longrope" and self.rotated != 2 * len(values[1:-1]):
            raise ValueError(f"longrope has {len(values[1:-1])} factors for {self.rotated} channels")


def longrope_scaling(
    factors: Iterable[float], original: float, context: float, magnitude: float | None
) -> tuple[str | float, ...]:
    """`RopeConfig.scaling` by LongRoPE (Ding et al., arXiv 2402.13753). context: tokens for which it is made."""
    if magnitude is None:
        magnitude = math.sqrt(1.0 + math.log(max(context / original, 1.0)) / math.log(original))
    return ("longrope", original, *map(float, factors), magnitude)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """What "yarn" multiplies q and k by, so that scores over a longer context stay as sharp."""
    return 1.0 + 0.1 * weight * math.log(max(factor, 1.0))


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and numerics of a model. Norm weights are such that y = x / rms(x) * w in every family.

    Raises:
        ValueError: a number is not positive.
    """

    family: str
    vocab_size: int
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int  # of the MLP, or of one expert
    max_context: int  # tokens
    norm_eps: float
    rope: RopeConfig
    attn_scale: float  # factor of q.k
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embed_scale: float = 1.0  # factor of embeddings
    logits_divisor: float = 1.0  # in effect already in the final norm's weights, as sources give them
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False  # Gemma's norms on the outputs of attention and MLP, before the residual add
    sliding_window: int | None = None  # position p attends to position j if p - j < sliding_window
    local_layers: tuple[bool, ...] = ()  # per layer, whether the window and the local rotary embedding apply
    experts: int = 0  # of a layer, in place of an MLP; 0: none
    experts_per_token: int = 0
    normalise_experts: bool = True  # whether the shares of a token's experts add up to 1
    output_size: int | None = None  # rows of an output table that was cut
    mask_token: int | None = None  # of a parallel draft model: stands for a token that is not known yet

    def __post_init__(self) -> None:
        _check_positive("the norms' epsilon", self.norm_eps)
        _check_positive("the context", self.max_context)
        rotated, width = self.rope.rotated, self.head_dim
        if rotated is not None and (rotated % 2 or width % 2 or not 0 < rotated <= width):
            raise ValueError(f"{rotated} of {width} channels of a head cannot be rotated")
        _check_positive("a scale", self.attn_scale, self.embed_scale, self.logits_divisor)
        _check_positive("a sliding window", 1 if self.sliding_window is None else self.sliding_window)
        if not (0 < self.experts_per_token <= self.experts or self.experts == self.experts_per_token == 0):
            raise ValueError(f"{self.experts_per_token} experts of {self.experts} for each token make no sense")

    @property
    def gate(self) -> Literal["silu", "gelu"]:
        """The activation by its kernels' name."""
        return "silu" if self.activation == "silu" else "gelu"

    def local(self, layer: int) -> bool:
        """Whether a layer is local, as `local_layers` says."""
        return bool(self.local_layers) and self.local_layers[layer]

    def window(self, layer: int) -> int:
        """The sliding window of a layer, in tokens; 0: it attends to all."""
        return self.sliding_window or 0 if self.local(layer) else 0

    def with_residual_scale(self, scale: float) -> ModelConfig:
        """The config of a model whose attention and MLP are multiplied by ``scale`` before the residual add.

        The decoder keeps the residual stream divided by ``scale``, so that it adds them as they are. Norms undo the
        division if their epsilon is divided by the square.
        """
        return replace(self, embed_scale=self.embed_scale / scale, norm_eps=self.norm_eps / scale**2)

    @property
    def mlps_per_token(self) -> int:
        """MLPs that a token passes in a layer: its experts, or the one."""
        return max(self.experts_per_token, 1)

    @property
    def mlp_share(self) -> float:
        """Part of a layer's MLP weights that a token reads."""
        return self.mlps_per_token / max(self.experts, 1)

    @property
    def q_size(self) -> int:
        """Columns of the query projection."""
        return self.n_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Columns of the key (and of the value) projection."""
        return self.n_kv_heads * self.head_dim
