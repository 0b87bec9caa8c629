"""In what types a model is held on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specdec.config import DeviceDtype

_ROWS = {
    "auto": torch.bfloat16,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
    "fp32": torch.float32,
}


@dataclass(frozen=True, slots=True)
class DeviceTypes:
    """``name``: of the layers' matrices, for people. ``rows``: of activations, the KV pool, norms, embedding and output
    matrix. ``fp8``: the layers' matrices are float8 e4m3. ``int4``: those that the checkpoint holds in 4 bits stay so.
    """

    name: str
    rows: torch.dtype
    fp8: bool
    int4: bool

    @staticmethod
    def of(dtype: DeviceDtype) -> DeviceTypes:
        """What the configuration's word stands for."""
        name = "bf16" if dtype == "auto" else dtype
        return DeviceTypes(name, _ROWS[dtype], fp8=dtype == "fp8", int4=dtype in ("auto", "bf16", "fp16"))
