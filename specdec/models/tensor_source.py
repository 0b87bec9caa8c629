"""What a checkpoint format must offer so that its weights can be packed."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from specdec.models.model_config import ModelConfig


class TensorSource(Protocol):
    """Named tensors of one checkpoint, by their role in the decoder.

    Roles: ``embed``, ``lm_head``, ``final_norm`` and ``layers.{i}.`` followed by attn_norm, q, k, v, o, q_norm,
    k_norm, attn_post_norm, mlp_norm, gate, up, down or mlp_post_norm; a bias is the role followed by ``.bias``.
    A source gives values in one convention whatever its file holds: matrices [out, in], rotary rows half-split,
    norms that multiply as they are. Reading is safe from several threads.
    """

    @property
    def name(self) -> str:
        """How messages call the model."""
        ...

    @property
    def config(self) -> ModelConfig:
        """The model's shape, without what only the tokenizer knows."""
        ...

    def has(self, role: str) -> bool:
        """Whether the checkpoint holds ``role``."""
        ...

    def shape(self, role: str) -> tuple[int, ...]:
        """Shape of ``role`` as ``rows`` or ``vector`` gives it; ModelError when it is missing."""
        ...

    def rows(self, role: str, low: int, high: int) -> Tensor:
        """Rows [low, high) of matrix ``role``, float32 [high - low, in]."""
        ...

    def vector(self, role: str) -> Tensor:
        """Vector ``role``, float32."""
        ...
