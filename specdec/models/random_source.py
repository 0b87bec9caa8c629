"""Random tensors of a model's shape, made when they are asked for."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from specdec.errors import ModelError
from specdec.models.layout import linear_plans, norm_plans
from specdec.models.model_config import ModelConfig
from specdec.models.random_tokenizer import control_token_ids

LOGIT_STD = 3.0  # of 128k tokens the likeliest then has about a fifth of the probability, as in an undecided text
_SCORE_STD = 2.0  # of q.k: a row attends to dozens of a thousand keys, neither to one nor to all
_GATED_RMS = 0.6  # of silu(g) u, g and u standard normal
_QUIET = 1 / 16  # rows of control tokens in the output matrix: a random model does not end its answers
_NORM_SPREAD, _BIAS_STD = 0.1, 0.1
_WORD = (1 << 64) - 1
_BYTE_STD = 256 / math.sqrt(12)


class RandomSource:
    """A `TensorSource` whose every value is a function of (seed, role, row, column) alone, uniformly distributed.

    Spreads are such that activations stay near 1 through all layers and logits are as `LOGIT_STD` says.
    """

    def __init__(self, name: str, config: ModelConfig, seed: int) -> None:
        self._name = name
        self._config = config
        self._seed = seed
        self._shapes = _shapes(config)

    @property
    def name(self) -> str:
        """How messages call the model."""
        return self._name

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self._config

    def has(self, role: str) -> bool:
        """Whether a model of this shape has ``role``."""
        return role in self._shapes

    def shape(self, role: str) -> tuple[int, ...]:
        """Shape of ``role``."""
        if role not in self._shapes:
            raise ModelError(f"{self._name}: a model of this shape has no tensor {role}")
        return self._shapes[role]

    def rows(self, role: str, low: int, high: int) -> Tensor:
        """Rows [low, high) of matrix ``role``, float32; takes about a nanosecond per value."""
        n_rows, columns = self.shape(role)
        low, high = min(low, n_rows), min(high, n_rows)
        values = self._uniform(role, low, high, columns) * self._std(role)
        if role == ("embed" if self._config.tie_embeddings else "lm_head"):
            quiet = [token - low for token in control_token_ids(n_rows) if low <= token < high]
            values[quiet] *= _QUIET
        return values

    def vector(self, role: str) -> Tensor:
        """Vector ``role``, float32: a bias near 0, a norm's weights near 1. Those of the last norm have either sign:
        where the output matrix is the embedding, a token would else make itself the likeliest to follow."""
        (size,) = self.shape(role)
        values = self._uniform(role, 0, 1, size)[0]
        if role.endswith(".bias"):
            return values * _BIAS_STD
        weights = 1.0 + values * _NORM_SPREAD
        return weights * values.sign() if role == "final_norm" else weights

    def _uniform(self, role: str, low: int, high: int, columns: int) -> Tensor:
        """Rows of variance 1 and mean 0, one random byte per value. A row begins on a whole word of the generator, so
        that it can be jumped to."""
        words = -(-columns // 8)
        digest = hashlib.sha256(f"{self._seed}|{role}".encode()).digest()
        bits = np.random.PCG64(int.from_bytes(digest[:16], "little")).advance(low * words)
        # whole words, not bytes: the only draw that takes one step of the generator per word, and frees other threads
        raw = np.random.Generator(bits).integers(0, _WORD, (high - low) * words, dtype=np.uint64, endpoint=True)
        values = raw.astype("<u8", copy=False).view(np.int8).reshape(high - low, 8 * words)[:, :columns]
        return torch.from_numpy(values).float().add_(0.5).div_(_BYTE_STD)

    def _std(self, role: str) -> float:
        config = self._config
        branch = 1 / math.sqrt(2 * config.n_layers)  # all layers' shares of the residual stream add up to about 1
        part = role.rpartition(".")[2]
        if part == "embed":
            return LOGIT_STD / math.sqrt(config.hidden_size) if config.tie_embeddings else 1.0
        if part == "lm_head":
            return LOGIT_STD / math.sqrt(config.hidden_size)
        if part in ("q", "k"):
            return math.sqrt(_SCORE_STD / config.hidden_size)
        if part == "o":
            return branch / math.sqrt(config.q_size)
        if part == "down":
            return branch / (_GATED_RMS * math.sqrt(config.intermediate_size))
        return 1 / math.sqrt(config.hidden_size)  # v, gate, up


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, config.hidden_size)}
    for plan in linear_plans(config, config.tie_embeddings):
        for role, rows in plan.parts:
            shapes[role] = (rows, plan.columns)
            if config.qkv_bias and plan.name.endswith("qkv"):
                shapes[role + ".bias"] = (rows,)
    shapes.update((role, (size,)) for role, size in norm_plans(config))
    return shapes
