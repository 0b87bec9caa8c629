"""The tensors of a paged KV cache; which page holds what is `specdec.kv_cache`'s business."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.models.model_config import ModelConfig
from verify_kernels.forward_batch import PAGE_SIZE


class KvPool:
    """K [layers, pages, kv_heads, head_dim, 64] and V [layers, pages, kv_heads, 64, head_dim], float32.

    K pages are transposed so that one vector load serves 16 keys. Zero-filled: an unwritten slot must hold a
    finite number, as masked keys are multiplied by zero.
    """

    def __init__(self, config: ModelConfig, pages: int) -> None:
        shape = (config.n_layers, pages, config.n_kv_heads)
        self.pages = pages
        self.k = torch.zeros(*shape, config.head_dim, PAGE_SIZE)
        self.v = torch.zeros(*shape, PAGE_SIZE, config.head_dim)

    @staticmethod
    def bytes_per_page(config: ModelConfig) -> int:
        """Bytes one page takes over all layers."""
        return 2 * 4 * config.n_layers * config.n_kv_heads * config.head_dim * PAGE_SIZE

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer."""
        return self.k[index], self.v[index]
