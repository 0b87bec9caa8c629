"""A feature head ready to run."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from draft.head_config import HeadConfig
from verify_kernels.packed_linear import PackedLinear


@dataclass(frozen=True, slots=True)
class HeadModel:
    """An EAGLE-3 head (Li et al., arXiv 2503.01840), packed. With h its hidden size:

    embed: [>= target vocabulary, h], float16 or float32. fc: from the tapped features of a token to h.
    embed_norm, hidden_norm, mlp_norm, final_norm: float32 [h]. qkv: rows [q; k; v] over 2h inputs (embedding, hidden);
    gate_up: rows [gate; up]. lm_head: [draft vocabulary, h]. target_ids: int64 [draft vocabulary], the target's id of
    each draft id, or None where the two vocabularies are one.
    """

    name: str
    config: HeadConfig
    target_vocab: int
    embed: Tensor
    fc: PackedLinear
    embed_norm: Tensor
    hidden_norm: Tensor
    qkv: PackedLinear
    o: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear
    final_norm: Tensor
    lm_head: PackedLinear
    target_ids: Tensor | None

    @property
    def taps(self) -> tuple[int, ...]:
        """What the target's `Decoder` must be built with."""
        return self.config.taps
