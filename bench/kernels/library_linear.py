"""A linear layer by the vendor's library, which adds in whatever order is fastest."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specdec.models.device.dense_linear import DenseLinear
from specdec.models.device.device_decoder import DeviceDecoder
from specdec.models.device.device_layer import DeviceLayer
from specdec.models.device.device_network import DeviceNetwork


class LibraryLinear(DenseLinear):
    """On the weights of another layer, to be timed beside it; nothing else uses it."""

    @staticmethod
    def of(dense: DenseLinear) -> LibraryLinear:
        """What computes the same, but for the order."""
        return LibraryLinear(dense.weight, dense._bias, dense._scratch)

    def plain(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """out = x W^T + bias + residual."""
        added = [tensor for tensor in (residual, self._bias) if tensor is not None]
        if any(tensor.dtype != x.dtype for tensor in (out, *added)):  # logits are float32
            out.copy_(torch.mm(x, self.weight.t()))
            for tensor in added:
                out.add_(tensor)
        elif not added:
            torch.mm(x, self.weight.t(), out=out)
        else:
            torch.addmm(added[0], x, self.weight.t(), out=out)
            for tensor in added[1:]:
                out.add_(tensor)


def library_network(decoder: DeviceDecoder) -> DeviceNetwork | None:
    """The decoder's model on the same weights and KV with every linear layer by the library; None where layers are
    quantised, for which it has none."""
    weights = decoder.model.weights
    layers = [_swapped(layer) for layer in weights.layers]
    if any(layer is None for layer in layers):
        return None
    found = [layer for layer in layers if layer is not None]
    model = replace(decoder.model, weights=replace(weights, layers=found, lm_head=LibraryLinear.of(weights.lm_head)))
    return DeviceNetwork(model, decoder.pool, decoder.buffer.tiers.largest, decoder.max_positions)


def _swapped(layer: DeviceLayer) -> DeviceLayer | None:
    linears = (layer.qkv, layer.o, layer.gate_up, layer.down)
    dense = [LibraryLinear.of(linear) for linear in linears if isinstance(linear, DenseLinear)]
    if len(dense) < len(linears):
        return None
    qkv, o, gate_up, down = dense
    return replace(layer, qkv=qkv, o=o, gate_up=gate_up, down=down)
