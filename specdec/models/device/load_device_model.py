"""Loads a model onto a GPU by whatever name it is given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from specdec.config import DeviceDtype
from specdec.errors import ModelError, UnsupportedModelError
from specdec.models.device.device_model import DeviceModel
from specdec.models.device.device_types import DeviceTypes
from specdec.models.device.weights_reader import WeightsReader
from specdec.models.layout import linear_plans
from specdec.models.load import check_vocabulary
from specdec.models.model_config import ModelConfig
from specdec.models.pack_model import check_shapes
from specdec.models.progress import Progress, silent
from specdec.models.quantized_source import QuantizedSource
from specdec.models.resolve import resolve
from specdec.models.tensor_source import TensorSource
from verify_kernels.gpu.attention_tiles import HEAD_DIMS, TILE

GIB = 1 << 30
FP8_CAPABILITY = (9, 0)


def load_device_model(
    ref: str,
    *,
    dtype: DeviceDtype,
    cache_dir: Path,
    device: torch.device,
    max_rows: int,
    progress: Progress | None = None,
) -> DeviceModel:
    """Load the model that ``ref`` names, as `specdec.models.load_model` does, for forwards of up to ``max_rows`` rows.

    Raises:
        ModelError: not found, truncated, corrupt, without tokenizer, or too large for the device's memory.
        UnsupportedModelError: sound, but nothing that the device's kernels run.
    """
    cache_dir, progress = cache_dir.expanduser(), progress or silent
    checkpoint = resolve(ref, cache_dir, progress)
    source, types = checkpoint.open(), DeviceTypes.of(dtype)
    if types.fp8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        raise ModelError("engine.device_dtype: this GPU has no fp8 products; set it to bf16 or fp16")
    check_heads(checkpoint.name, source.config)
    check_shapes(source)
    _check_memory(source, types, device)
    weights = WeightsReader(source, types, device, max_rows, progress).read()
    tokenizer = checkpoint.tokenizer(cache_dir, source.config)
    check_vocabulary(checkpoint.name, source.config, tokenizer)
    config = replace(source.config, bos_id=tokenizer.bos_id, add_bos=tokenizer.add_bos, eos_ids=tokenizer.eos_ids)
    held = "int4" if types.int4 and isinstance(source, QuantizedSource) else types.name
    return DeviceModel(checkpoint.name, config, held, types, weights, tokenizer)


def check_heads(name: str, config: ModelConfig) -> None:
    """UnsupportedModelError unless the attention kernels know such heads."""
    group = config.n_heads // config.n_kv_heads
    if config.head_dim not in HEAD_DIMS or config.n_heads % config.n_kv_heads or group > TILE:
        sizes = ", ".join(map(str, HEAD_DIMS))
        raise UnsupportedModelError(
            f"{name}: {config.n_heads} heads of {config.head_dim} over {config.n_kv_heads} KV heads do not run on a "
            f"GPU; heads must be {sizes} wide and a multiple of the KV heads; set engine.device to cpu"
        )


def _check_memory(source: TensorSource, types: DeviceTypes, device: torch.device) -> None:
    """Of an unquantised model: how much smaller a quantised one is shows only when it is read."""
    if device.type != "cuda" or (types.int4 and isinstance(source, QuantizedSource)):
        return
    config = source.config
    plans = linear_plans(config, config.tie_embeddings)
    layers = sum(plan.rows * plan.columns for plan in plans if plan.name != "lm_head")
    ends = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    need = layers * (1 if types.fp8 else types.rows.itemsize) + ends * types.rows.itemsize
    free, _ = torch.cuda.mem_get_info(device)
    if need > free:
        raise ModelError(
            f"{source.name}: its weights need {need / GIB:.1f} GiB of the device, {free / GIB:.1f} GiB are free; "
            "set engine.device_dtype to fp8, use a smaller or quantised model, or set engine.device to cpu"
        )
