"""A `TensorSource` over a GGUF file."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specdec.errors import ModelError
from specdec.models.gguf_config import parse_gguf_config
from specdec.models.gguf_file import GGUFFile
from specdec.models.model_config import ModelConfig

_TOP = {"embed": "token_embd", "final_norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "attn_post_norm": "post_attention_norm",
    "mlp_post_norm": "post_ffw_norm",
}


class GGUFSource:
    """Tensors of an open GGUF file, dequantised slice by slice.

    Files of architecture `llama` hold the rows of q and k permuted, for rotary embedding of neighbouring pairs;
    they are put back in half-split order. Gemma's norms already hold their +1 in a GGUF file.
    """

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self._config = parse_gguf_config(file)
        self._order: dict[str, np.ndarray] = {}
        if self._config.family == "llama":
            dim = self._config.head_dim
            self._order = {
                "q": half_split_order(self._config.n_heads, dim),
                "k": half_split_order(self._config.n_kv_heads, dim),
            }

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self._file.path.stem

    @property
    def config(self) -> ModelConfig:
        """The model's shape, without token ids."""
        return self._config

    def has(self, role: str) -> bool:
        """Whether the file holds ``role``."""
        return self._tensor_name(role) in self._file.tensors

    def shape(self, role: str) -> tuple[int, ...]:
        """Shape of ``role``."""
        name = self._tensor_name(role)
        if name not in self._file.tensors:
            raise ModelError(f"{self._file.path}: tensor {name} is missing; the file is incomplete, fetch it again")
        return self._file.tensors[name].shape

    def rows(self, role: str, low: int, high: int) -> Tensor:
        """Rows [low, high) of matrix ``role``, float32."""
        order = self._order.get(role.rpartition(".")[2])
        index = slice(low, high) if order is None else order[low:high]
        return torch.from_numpy(self._file.rows(self._tensor_name(role), index))

    def vector(self, role: str) -> Tensor:
        """Vector ``role``, float32."""
        values = torch.from_numpy(self._file.rows(self._tensor_name(role), slice(None))).reshape(-1)
        order = self._order.get(role.removesuffix(".bias").rpartition(".")[2]) if role.endswith(".bias") else None
        return values if order is None else values[torch.from_numpy(order)]

    @staticmethod
    def _tensor_name(role: str) -> str:
        role, kind = (role.removesuffix(".bias"), ".bias") if role.endswith(".bias") else (role, ".weight")
        if role in _TOP:
            return _TOP[role] + kind
        _, layer, part = role.split(".")
        return f"blk.{layer}.{_LAYER.get(part, part)}{kind}"


def half_split_order(heads: int, head_dim: int) -> np.ndarray:
    """Where in the file each row of a half-split q or k lies: row j of a head's first half is stored at 2j, of its
    second half at 2j + 1. int64 [heads * head_dim]."""
    half = head_dim // 2
    within = np.concatenate([np.arange(half) * 2, np.arange(half) * 2 + 1])
    return (np.arange(heads)[:, None] * head_dim + within[None]).reshape(-1)
