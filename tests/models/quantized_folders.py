"""Writes AWQ, GPTQ and compressed-tensors folders, quantised and packed here by the formats' public descriptions alone.

AWQ: a word holds eight neighbouring output channels of one input channel; from its lowest four bits up they are number
0, 2, 4, 6, 1, 3, 5, 7. GPTQ: a word of qweight holds neighbouring input channels of one output channel, one of qzeros
neighbouring output channels of one group, both from the lowest bits up; the first format stores zero points less one.
compressed-tensors: as GPTQ, but the other way round, [out, in], and without that one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.models.tiny import make_tiny_model

Ints = NDArray[np.int64]
AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # the position of each of eight channels in its word


@dataclass(frozen=True)
class Scheme:
    """How to quantise; ``v2``: the second GPTQ format; ``act_order``: groups of channels all over the matrix."""

    method: str
    bits: int = 4
    group: int = 32
    sym: bool = False
    v2: bool = False
    act_order: bool = False
    lm_head: bool = False
    scales: torch.dtype = torch.float16

    @property
    def config(self) -> dict[str, Any]:
        """As config.json has it."""
        if self.method == "compressed-tensors":
            return self._compressed
        common = {"quant_method": self.method, "bits": self.bits, "group_size": self.group}
        if self.method == "awq":
            return common | {"zero_point": True, "version": "gemm", "modules_to_not_convert": None}
        layout = {"checkpoint_format": "gptq_v2"} if self.v2 else {}
        return common | layout | {"sym": self.sym, "desc_act": self.act_order, "lm_head": self.lm_head}

    @property
    def _compressed(self) -> dict[str, Any]:
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.sym,
            "strategy": "channel" if self.group == -1 else "group",
            "group_size": None if self.group == -1 else self.group,
            "actorder": "group" if self.act_order else None,
            "dynamic": False,
        }
        scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": scheme},
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
        }


def quantise(weight: NDArray[np.float32], scheme: Scheme, seed: int) -> tuple[dict[str, Any], NDArray[np.float32]]:
    """The tensors of one module, and the float32 matrix they stand for. Levels, zero points and groups are checked by
    the second; how well they approximate ``weight`` does not matter."""
    outputs, inputs = weight.shape
    size = inputs if scheme.group == -1 else scheme.group
    order = np.random.default_rng(seed).permutation(inputs) if scheme.act_order else np.arange(inputs)
    groups = np.empty(inputs, dtype=np.int64)
    groups[order] = np.arange(inputs) // size
    count, top = int(groups.max()) + 1, 2**scheme.bits - 1
    scales, zeros = np.empty((outputs, count), np.float32), np.empty((outputs, count), np.int64)
    for g in range(count):
        part = weight[:, groups == g]
        low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
        wide = 2 * np.maximum(-low, high) if scheme.sym else high - low
        scales[:, g] = torch.from_numpy(wide / top).to(scheme.scales).float()
        if scheme.sym:
            zeros[:, g] = (top + 1) // 2
        else:
            zeros[:, g] = np.clip(
                np.rint(-low / scales[:, g]), 1 if scheme.method == "gptq" and not scheme.v2 else 0, top
            )
    spread = scales[:, groups]
    levels = np.clip(np.rint(weight / spread) + zeros[:, groups], 0, top).astype(np.int64)
    matrix = (levels - zeros[:, groups]).astype(np.float32) * spread
    pack = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed}[scheme.method]
    return pack(levels, zeros, torch.from_numpy(scales).to(scheme.scales), groups, scheme), matrix


def write_folder(folder: Path, scheme: Scheme, family: str = "llama", **model: Any) -> tuple[Path, Path]:
    """A tiny model: (quantised folder, folder of the float32 matrices that it stands for)."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": not scheme.lm_head}
    plain = make_tiny_model(family, folder / "plain", **(sizes | model))
    quantised = make_tiny_model(family, folder / "quantised", **(sizes | model))
    quantise_folder(plain, quantised, scheme)
    return quantised, plain


def quantise_folder(plain: Path, quantised: Path, scheme: Scheme) -> None:
    """Quantise the matrices of ``plain`` into ``quantised``, a copy of it, and round those of ``plain`` alike."""
    state = load_file(plain / "model.safetensors")
    packed = dict(state)
    for seed, name in enumerate(sorted(state)):
        if not (name.endswith("_proj.weight") or (scheme.lm_head and "lm_head." in name)):
            continue
        tensors, matrix = quantise(state[name].numpy(), scheme, 0 if ".self_attn." in name else seed)
        state[name] = torch.from_numpy(matrix)
        del packed[name]
        packed.update({f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in tensors.items()})
    save_file(state, plain / "model.safetensors", {"format": "pt"})
    save_file(packed, quantised / "model.safetensors", {"format": "pt"})
    change_config(quantised, scheme.config)


def change_config(folder: Path, quantization: dict[str, Any]) -> None:
    """Set ``quantization_config`` of a folder."""
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data | {"quantization_config": quantization}))


def _awq(levels: Ints, zeros: Ints, scales: torch.Tensor, groups: Ints, scheme: Scheme) -> dict[str, Any]:
    def pack(columns: Ints) -> Any:
        words = np.zeros((columns.shape[0], columns.shape[1] // 8), np.int64)
        for c in range(columns.shape[1]):
            words[:, c // 8] += columns[:, c] << (4 * AWQ_PLACES[c % 8])
        return _int32(words)

    return {"qweight": pack(levels.T), "qzeros": pack(zeros.T), "scales": scales.t().contiguous()}


def _gptq(levels: Ints, zeros: Ints, scales: torch.Tensor, groups: Ints, scheme: Scheme) -> dict[str, Any]:
    stored = zeros - (0 if scheme.v2 else 1)
    return {
        "qweight": _int32(_pack_rows(levels.T, scheme.bits)),
        "qzeros": _int32(_pack_rows(stored, scheme.bits).T),
        "scales": scales.t().contiguous(),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }


def _compressed(levels: Ints, zeros: Ints, scales: torch.Tensor, groups: Ints, scheme: Scheme) -> dict[str, Any]:
    parts = {
        "weight_packed": _int32(_pack_rows(levels.T, scheme.bits).T),
        "weight_scale": scales.contiguous(),
        "weight_shape": torch.tensor(levels.shape),
    }
    if not scheme.sym:
        parts["weight_zero_point"] = _int32(_pack_rows(zeros, scheme.bits))
    if scheme.act_order:
        parts["weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
    return parts


def _pack_rows(rows: Ints, bits: int) -> Ints:
    per_word = 32 // bits
    words = np.zeros((-(-rows.shape[0] // per_word), rows.shape[1]), np.int64)
    for r in range(rows.shape[0]):
        words[r // per_word] += rows[r] << (bits * (r % per_word))
    return words


def _int32(words: Ints) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(words).astype(np.uint32).view(np.int32))
