"""A model on a GPU, its KV pool and its buffers as one decoder, if the device's memory allows."""

from __future__ import annotations

import torch

from specdec.config import EngineConfig
from specdec.engine.device_needs import device_needs
from specdec.engine.memory_need import MemoryNeed
from specdec.errors import ConfigError, ModelError
from specdec.models.device.device_decoder import DeviceDecoder
from specdec.models.device.device_model import DeviceModel
from specdec.models.device.device_pool import FP8
from specdec.tree import MAX_NODES
from verify_kernels.forward_batch import PAGE_SIZE

GIB = 1 << 30
FP8_CAPABILITY = (8, 9)  # that converts to and from float8


def build_device_decoder(
    config: EngineConfig,
    model: DeviceModel,
    device: torch.device,
    pages: int,
    positions: int,
    taps: tuple[int, ...] = (),
) -> DeviceDecoder:
    """A decoder with a KV pool of ``pages`` pages, for sequences of up to ``positions`` tokens and room for a tree.

    Raises:
        ModelError: the device's memory is short.
        ConfigError: a float8 KV cache was asked for, which the device can not have.
    """
    kv_dtype = FP8 if config.kv_dtype == "fp8" else model.types.rows
    max_logit_rows = min(config.max_step_rows, config.max_batch * MAX_NODES)
    max_positions = positions + PAGE_SIZE
    if device.type == "cuda":
        if kv_dtype == FP8 and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
            raise ConfigError("engine.kv_dtype: this GPU knows no fp8; set it to auto")
        needs = device_needs(
            model, kv_dtype, device, pages=pages, max_rows=config.max_step_rows, max_logit_rows=max_logit_rows,
            max_positions=max_positions, taps=len(taps),
        )  # fmt: skip
        _check_memory(needs, torch.cuda.mem_get_info(device)[0])
    return DeviceDecoder(
        model,
        pages,
        device,
        max_entries=config.max_batch,
        max_rows=config.max_step_rows,
        max_logit_rows=max_logit_rows,
        max_positions=max_positions,
        taps=taps,
        kv_dtype=kv_dtype,
    )


def _check_memory(needs: list[MemoryNeed], free: int) -> None:
    """ModelError where all of it is more than there is; it names what the largest part depends on."""
    together = sum(need.nbytes for need in needs)
    if together <= free:
        return
    ordered = sorted(needs, key=lambda need: -need.nbytes)
    most = ordered[0]
    others = ", ".join(f"{need.what} {need.nbytes / GIB:.1f}" for need in ordered[1:])
    raise ModelError(
        f"{most.options[0]}: {most.what} needs {most.nbytes / GIB:.1f} GiB of the device, and with {others} "
        f"it comes to {together / GIB:.1f} GiB; {free / GIB:.1f} GiB are free; "
        f"lower {' or '.join(option.removeprefix('engine.') for option in most.options)}"
    )
