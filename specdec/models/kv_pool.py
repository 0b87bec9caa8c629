"""The tensors of a paged KV cache; which page holds what is `specdec.kv_cache`'s business."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from specdec.models.model_config import ModelConfig
from verify_kernels.forward_batch import PAGE_SIZE


class KvPool:
    """K [layers, pages, kv_heads, head_dim, 64] and V [layers, pages, kv_heads, 64, head_dim], float32.

    K pages are transposed so that one vector load serves 16 keys. Zero-filled.
    """

    def __init__(self, config: ModelConfig, pages: int) -> None:
        shape = (config.n_layers, pages, config.n_kv_heads)
        self.pages = pages
        self.k = _zeros(*shape, config.head_dim, PAGE_SIZE)
        self.v = _zeros(*shape, PAGE_SIZE, config.head_dim)

    @staticmethod
    def bytes_per_page(config: ModelConfig) -> int:
        """Bytes one page takes over all layers."""
        return 2 * 4 * config.n_layers * config.n_kv_heads * config.head_dim * PAGE_SIZE

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer."""
        return self.k[index], self.v[index]


def _zeros(*shape: int) -> Tensor:
    """Zero-filled float32 on huge pages where the system grants them; memory is taken as it is first written."""
    memory = mmap.mmap(-1, math.prod(shape) * 4)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32).view(*shape)
