"""One flat piece of memory that holds all packed weights of a model."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from specdec.config import WeightDtype
from specdec.models.array_spec import DTYPES, ArraySpec
from specdec.models.layout import layout_bytes, linear_kind
from specdec.models.model_config import ModelConfig
from specdec.models.weights import LayerWeights, ModelWeights
from verify_kernels.packed_linear import PackedLinear


class WeightsBuffer:
    """Private anonymous memory, on huge pages where the system grants them, with a tensor view per array.

    Kernels stream the weights once per step: with 4 KiB pages a good part of that time is page-table walks.
    The views keep the memory alive; it is given back when the last of them is gone.
    """

    def __init__(self, layout: list[ArraySpec]) -> None:
        self.layout = layout
        self.nbytes = layout_bytes(layout)
        self._memory = _allocate(self.nbytes)
        flat = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._views = {spec.name: _view(flat, spec) for spec in layout}

    def bytes_view(self) -> memoryview:
        """The whole buffer, writable, as a cache file is read into it or written from it."""
        return memoryview(self._memory)[: self.nbytes]

    def view(self, name: str) -> Tensor:
        """The array called ``name``; writing to it writes the buffer."""
        return self._views[name]

    def find(self, name: str) -> Tensor | None:
        """The array called ``name``, or None when the model has none."""
        return self._views.get(name)

    def weights(self, config: ModelConfig, dtype: WeightDtype) -> ModelWeights:
        """The decoder's view of the buffer; shares its memory."""
        hidden = config.hidden_size
        return ModelWeights(
            embed=self.view("embed"),
            layers=[self._layer(config, dtype, f"layers.{i}.") for i in range(config.n_layers)],
            final_norm=self.view("final_norm"),
            lm_head=self._linear("lm_head", dtype, config.vocab_size, hidden),
        )

    def _layer(self, config: ModelConfig, dtype: WeightDtype, p: str) -> LayerWeights:
        hidden, ffn = config.hidden_size, config.intermediate_size
        return LayerWeights(
            attn_norm=self.view(p + "attn_norm"),
            qkv=self._linear(p + "qkv", dtype, config.q_size + 2 * config.kv_size, hidden),
            q_norm=self.find(p + "q_norm"),
            k_norm=self.find(p + "k_norm"),
            o=self._linear(p + "o", dtype, hidden, config.q_size),
            attn_post_norm=self.find(p + "attn_post_norm"),
            mlp_norm=self.view(p + "mlp_norm"),
            gate_up=self._linear(p + "gate_up", dtype, 2 * ffn, hidden),
            down=self._linear(p + "down", dtype, hidden, ffn),
            mlp_post_norm=self.find(p + "mlp_post_norm"),
        )

    def _linear(self, name: str, dtype: WeightDtype, n: int, k: int) -> PackedLinear:
        kind = linear_kind(name, dtype)
        return PackedLinear(
            kind, n, k, self.view(name + ".data"), self.find(name + ".scale"), self.find(name + ".bias")
        )


def _allocate(nbytes: int) -> mmap.mmap:
    # private, because the default (shared) anonymous memory is not eligible for transparent huge pages
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _view(flat: Tensor, spec: ArraySpec) -> Tensor:
    assert math.prod(spec.shape) > 0, spec.name
    piece = flat[spec.offset : spec.offset + spec.nbytes]
    return piece.view(DTYPES[spec.dtype]).view(spec.shape)
