"""The tensors of a paged KV cache on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.models.model_config import ModelConfig
from verify_kernels.forward_batch import PAGE_SIZE


class DevicePool:
    """K and V each [layers, pages, kv_heads, 64, head_dim]. Zero-filled: what was never written may be read, masked."""

    def __init__(self, config: ModelConfig, pages: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (config.n_layers, pages, config.n_kv_heads, PAGE_SIZE, config.head_dim)
        self.pages = pages
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    @staticmethod
    def bytes_per_page(config: ModelConfig, dtype: torch.dtype) -> int:
        """Bytes one page takes over all layers."""
        return 2 * dtype.itemsize * config.n_layers * config.n_kv_heads * config.head_dim * PAGE_SIZE

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer."""
        return self.k[index], self.v[index]
