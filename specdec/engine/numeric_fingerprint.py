"""The numeric fingerprint: engines with equal ones return the same bits for the same request.

It covers what decides about tokens: packed weights, shape, vocabulary, types of weights and KV cache, kernels, rounding
of this machine, and the release. It leaves out what path identity makes irrelevant: threads, batch, cache size, drafts.
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

_DECIDING = ("llguidance", "tokenizers")  # packages whose releases may split text or mask tokens differently
_POSITIONS = 1024  # rows of the rotary tables that are hashed


def numeric_fingerprint(model: LoadedModel[Any], kv_dtype: str, mode: NumericMode, arithmetic: str) -> str:
    """32 hex digits, 8 for each of `FINGERPRINT_PARTS`. arithmetic: see `host_arithmetic` and `gpu_arithmetic`."""
    tokenizer = model.tokenizer
    edges = [tokenizer.bos_id, tokenizer.add_bos, tokenizer.eos_ids]
    parts = {
        "weights": [model.digest, asdict(model.config), tokenizer.fingerprint, edges],
        "numeric types": [model.dtype, kv_dtype],
        "kernels or processor": [arithmetic, mode, _rotary_bits(model.config)],
        "release": [specdec.__version__, {name: version(name) for name in _DECIDING}],
    }
    digests = (hashlib.sha256(json.dumps(parts[name]).encode()).hexdigest() for name in FINGERPRINT_PARTS)
    return "".join(digest[:PART_DIGITS] for digest in digests)


def host_arithmetic(kernels: Kernels) -> str:
    """The properties of a CPU's kernels that bits depend on.

    The native kernels run the same operations in the same order on every processor; only whether multiply and add are
    fused differs, which a small product shows. The reference kernels are torch's: processor and release decide.
    """
    if kernels.name == "native":
        return f"native {_computed_bits(kernels)}"
    return f"{kernels.name} {torch.__version__} {platform.machine()} {cpu_flags()}"


def gpu_arithmetic(device: torch.device) -> str:
    """The same for a GPU: kernels are compiled for it, with tiles chosen by its name."""
    if device.type != "cuda":
        return f"triton's interpreter {version('triton')} {torch.__version__} {cpu_flags()}"
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    return f"triton {version('triton')} {torch.__version__} {name} {capability}"


def _computed_bits(kernels: Kernels) -> str:
    """Digest of a small product in which everything rounds: a gate's exponential, long sums, fused operations."""
    rows, n, k = 3, 64, 600
    numbers = np.random.default_rng(19)
    weight, source = (torch.from_numpy(numbers.random(shape, np.float32) - 0.5) for shape in ((n, k), (rows, 2 * k)))
    result = torch.zeros(rows, n)
    backend = kernels.backend()
    backend.reserve(rows, k, n)
    backend.bind(LinearSpec(pack_linear(weight, None, "fp32"), source, result, "silu", "store"))(rows)
    return hashlib.sha256(result.numpy().tobytes()).hexdigest()


def _rotary_bits(config: ModelConfig) -> str:
    """Digest of the rotary tables, whose sines torch computes by the processor's instructions."""
    digest = hashlib.sha256()
    for local in config.rope.kinds:
        for table in rope_tables(config.rope, config.head_dim, _POSITIONS, local=local):
            digest.update(table.numpy().tobytes())
    return digest.hexdigest()
