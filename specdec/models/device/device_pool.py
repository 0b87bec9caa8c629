"""The tensors of a paged KV cache on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.models.model_config import ModelConfig
from verify_kernels.forward_batch import PAGE_SIZE

FP8 = torch.float8_e4m3fn


class DevicePool:
    """K and V each [layers, pages, kv_heads, 64, head_dim]. Zero-filled: what was never written may be read, masked.

    ``scales``: what the kernels want beside a float8 pool, k_scale and v_scale, float32 [kv_heads]; empty for others.
    They are 1: keys and values of trained models lie far within float8's range of 448, and its precision is relative.
    """

    def __init__(self, config: ModelConfig, pages: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (config.n_layers, pages, config.n_kv_heads, PAGE_SIZE, config.head_dim)
        self.pages = pages
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        names = ("k_scale", "v_scale") if dtype == FP8 else ()
        self.scales = {name: torch.ones(config.n_kv_heads, dtype=torch.float32, device=device) for name in names}

    @staticmethod
    def bytes_per_page(config: ModelConfig, dtype: torch.dtype) -> int:
        """Bytes one page takes over all layers."""
        return 2 * dtype.itemsize * config.n_layers * config.n_kv_heads * config.head_dim * PAGE_SIZE

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer."""
        return self.k[index], self.v[index]
