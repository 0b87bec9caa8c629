"""The numeric fingerprint: two engines that have the same one say the same bits to the same request.

Whatever decides about a token is in it: the very bytes of the packed weights, the model's shape and vocabulary, the
types of weights and KV cache, the kernels and how this machine rounds in them, and the release, which stands for the
code. Left out is what path identity makes irrelevant: threads, batch, size of the KV cache, drafts and their choice.
"""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

import specdec
from specdec.errors import FINGERPRINT_PARTS, PART_DIGITS
from specdec.models.config import ModelConfig
from specdec.models.decoder import rope_tables
from specdec.models.load import LoadedModel
from verify_kernels.backend import LinearSpec
from verify_kernels.backend_selection import Kernels, NumericMode
from verify_kernels.cpu.library import cpu_flags
from verify_kernels.packed_weights import pack_linear

_DECIDING = ("llguidance", "tokenizers")  # packages whose releases may mask, split or join tokens otherwise
_POSITIONS = 1024  # of the rotary tables that are looked at


def numeric_fingerprint(model: LoadedModel[Any], kv_dtype: str, mode: NumericMode, arithmetic: str) -> str:
    """32 hex digits, 8 for each of `FINGERPRINT_PARTS`, for a target that is served as ``kv_dtype`` and ``mode`` say.
    arithmetic: what of the machine and its kernels decides about bits."""
    parts = {
        "weights": [model.bits, asdict(model.config), model.tokenizer.fingerprint],
        "numeric types": [model.dtype, kv_dtype],
        "kernels or processor": [arithmetic, mode, _rotary_bits(model.config)],
        "release": [specdec.__version__, {name: version(name) for name in _DECIDING}],
    }
    digests = (hashlib.sha256(json.dumps(parts[name]).encode()).hexdigest() for name in FINGERPRINT_PARTS)
    return "".join(digest[:PART_DIGITS] for digest in digests)


def host_arithmetic(kernels: Kernels) -> str:
    """What a CPU's kernels compute by.

    The native ones run the same operations in the same order on every processor, so that only whether multiply and add
    round once or twice is left to it, and that shows in what they compute. The reference ones are torch's, which
    chooses among its own by processor and release.
    """
    if kernels.name == "native":
        return f"native {_computed_bits(kernels)}"
    return f"{kernels.name} {torch.__version__} {platform.machine()} {cpu_flags()}"


def gpu_arithmetic(device: torch.device) -> str:
    """What a GPU's kernels compute by: they are compiled for it, and their tiles are chosen by it."""
    if device.type != "cuda":
        return f"triton's interpreter {version('triton')} {torch.__version__} {cpu_flags()}"
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    return f"triton {version('triton')} {torch.__version__} {name} {capability}"


def _computed_bits(kernels: Kernels) -> str:
    """Digest of a small product with all that rounds: a gate's exponential, long sums, fused multiply and add."""
    rows, n, k = 3, 64, 600
    numbers = np.random.default_rng(19)
    weight, source = (torch.from_numpy(numbers.random(shape, np.float32) - 0.5) for shape in ((n, k), (rows, 2 * k)))
    result = torch.zeros(rows, n)
    backend = kernels.backend()
    backend.reserve(rows, k, n)
    backend.linear(LinearSpec(pack_linear(weight, None, "fp32"), source, result, "silu", "store"))(rows)
    return hashlib.sha256(result.numpy().tobytes()).hexdigest()


def _rotary_bits(config: ModelConfig) -> str:
    """Digest of the rotary tables, whose sines torch computes by the instructions that it finds."""
    digest = hashlib.sha256()
    for local in (False, True) if config.rope.local_theta is not None else (False,):
        for table in rope_tables(config.rope, config.head_dim, _POSITIONS, local=local):
            digest.update(table.numpy().tobytes())
    return digest.hexdigest()
