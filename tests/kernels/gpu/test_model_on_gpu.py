"""A whole model on a real GPU: bfloat16 against float32, bits in any batch, graphs, and the promise itself."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.path_identity import verify
from specdec.config import EngineConfig, SpeculationConfig
from specdec.engine.build import build_parts
from specdec.models.device_decoder import DeviceDecoder, device_self_test
from tests.models.device.small import device_decoder, host_decoder, shape
from tests.models.device.test_device_decoder import GEMMA, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("changes", [{}, GEMMA], ids=["qwen", "gemma"])
@pytest.mark.parametrize(("dtype", "error"), [("bf16", 3e-2), ("fp16", 5e-3), ("fp8", 0.15)])
def test_logits_are_close_to_float32(changes: dict[str, Any], dtype: str, error: float) -> None:
    config = shape(**changes)
    for got, expected in zip(run(device_decoder(config, dtype)), run(host_decoder(config)), strict=True):
        assert torch.linalg.norm(got - expected) <= error * torch.linalg.norm(expected)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("changes", [{}, GEMMA], ids=["qwen", "gemma"])
def test_the_batch_changes_no_bit(changes: dict[str, Any], dtype: str) -> None:
    assert device_self_test(device_decoder(shape(**changes), dtype)) == "bitwise"


def test_replayed_steps_equal_direct_ones() -> None:
    decoder = device_decoder(shape(), "bf16")
    once, recorded, replayed = run(decoder), run(decoder), run(decoder)
    assert len(decoder.graphs._graphs) >= 3
    assert all(map(torch.equal, once, recorded))
    assert all(map(torch.equal, once, replayed))


@pytest.mark.parametrize("target", ["random:qwen2.5-coder-1.5b", "random:llama-3.1-8b"])
def test_speculation_changes_no_token(target: str) -> None:
    """`specdec verify`, with a fresh choice of requests each time; a failure names its seed."""
    seed = int(time.time())
    config = EngineConfig(
        target=target, device="cuda", kernels="reference", cache_dir=Path("~/.cache/specdec"), max_context=2048,
        kv_tokens=65536, speculation=SpeculationConfig(drafters=("suffix", "oracle:0.7"), profile_s=0), strict=True,
    )  # fmt: skip
    parts = build_parts(config)
    assert isinstance(parts.decoder, DeviceDecoder)
    report = verify(parts, pairs=20, max_tokens=24, seed=seed, say=print)
    assert not report.mismatches, f"seed {seed}: {report.mismatches[0]}"
    assert report.total("accepted")
