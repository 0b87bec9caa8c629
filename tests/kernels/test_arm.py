"""The kernels on ARM: cross-compiled for three levels of instructions, and run under an emulator."""

from __future__ import annotations

import shutil
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kernels.natives import native_backend
from tests.kernels.test_instruction_sets import AVX2, can_run
from tests.kernels.test_linear import KINDS, make_linear_spec
from tests.kernels.test_quant_linear import QUANT_CASES, ROWS, make_inputs, packed_blocks, run_linear
from verify_kernels.cpu.library import FLAGS, SOURCES
from verify_kernels.cpu.native_backend import _CHANNELS_PER_GROUP, _KINDS
from verify_kernels.packed_weights import PackedLinear
from verify_kernels.reference.backend import ReferenceBackend

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
PROCESSORS = {"neon": "armv8-a", "dotprod": "armv8.2-a+dotprod", "i8mm": "armv8.6-a"}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None,
        reason=f"needs {COMPILER} and {EMULATOR} (Debian: g++-aarch64-linux-gnu, qemu-user)",
    ),
]


@pytest.fixture(scope="module", params=PROCESSORS)
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All kernels and the driver as one program."""
    program = tmp_path_factory.mktemp("arm") / "driver"
    files = [str(path) for path in (*sorted(SOURCES.glob("*.cpp")), Path(__file__).parent / "linear_driver.cpp")]
    flags = [flag for flag in FLAGS if not flag.startswith(("-O", "-march", "-shared", "-fPIC"))]
    built = ["-O1", f"-march={PROCESSORS[request.param]}", "-static", f"-I{SOURCES}", *flags]
    subprocess.run([COMPILER, *built, "-o", str(program), *files], check=True, timeout=400)
    return program


def _run_on_arm(driver: Path, layers: list[tuple[PackedLinear, torch.Tensor]]) -> list[torch.Tensor]:
    """The output of every layer, without its bias, for its rows."""
    described = bytearray()
    for weight, x in layers:
        scale = np.zeros(0, np.float32) if weight.scale is None else weight.scale.numpy()
        k_pad = weight.data.shape[1] * _CHANNELS_PER_GROUP.get(weight.kind, 1)
        sizes = (weight.k, k_pad, weight.tiles, len(x), weight.nbytes, scale.size, weight.order is not None)
        described += struct.pack("<9i", _KINDS[weight.kind], weight.n, *sizes)
        described += weight.data.view(torch.uint8).numpy().tobytes() + scale.tobytes()
        described += b"" if weight.order is None else weight.order.numpy().tobytes()
        described += x.contiguous().numpy().tobytes()
    run = [EMULATOR, "-cpu", "max", str(driver)]
    out = subprocess.run(run, input=bytes(described), capture_output=True, check=True, timeout=400).stdout
    values, results = torch.frombuffer(bytearray(out), dtype=torch.float32), []
    for weight, x in layers:
        results.append(values[: len(x) * weight.n].view(len(x), weight.n))
        values = values[len(x) * weight.n :]
    assert len(values) == 0
    return results


def test_blocks_are_multiplied_like_by_the_twin(driver: Path) -> None:
    weights = [replace(packed_blocks(*case), bias=None) for case in QUANT_CASES]
    order = torch.randperm(576, generator=torch.Generator().manual_seed(3)).int()
    weights.append(replace(packed_blocks("u4_64", 40, 576), bias=None, order=order))
    layers = [(weight, make_inputs(weight.k)[:rows]) for weight in weights for rows in (1, 3, 8, ROWS)]
    for (weight, x), found in zip(layers, _run_on_arm(driver, layers), strict=True):
        assert torch.equal(found, run_linear(ReferenceBackend(1), weight, make_inputs(weight.k), len(x))), (
            weight.kind,
            len(x),
        )


def test_other_layers_have_the_bits_of_this_processor(driver: Path) -> None:
    if not can_run(AVX2):
        pytest.skip("this processor does not fuse multiply and add, as every ARM processor does")
    specs = [make_linear_spec(kind, 130, k, "none", "store") for kind in KINDS for k in (576, 300)]
    layers = [(replace(spec.weight, bias=None), spec.src[:13]) for spec in specs]
    for (weight, x), found in zip(layers, _run_on_arm(driver, layers), strict=True):
        assert torch.equal(found, run_linear(native_backend(), weight, x, 13)), weight.kind
