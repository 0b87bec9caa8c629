"""Models of 4-bit and 8-bit weights on the device, against the matrices that these stand for."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from specdec.config import DeviceDtype
from specdec.errors import ModelError, UnsupportedModelError
from specdec.models import device_weights
from specdec.models.decoder import Decoder, KvPool
from specdec.models.device_decoder import DeviceDecoder
from specdec.models.device_weights import (
    DenseLinear,
    DeviceTypes,
    Fp8Linear,
    Int4Linear,
    WeightsReader,
    load_device_model,
)
from specdec.models.load import load_model
from specdec.models.pack import fused_rows
from specdec.models.progress import silent
from specdec.models.random_model import RANDOM_SHAPES, RandomSource
from specdec.models.resolve import HFCheckpoint
from specdec.models.weights import linear_plans
from tests.models.device.small import place, shape
from tests.models.quantized_folders import Scheme, write_folder
from verify_kernels.forward_batch import BatchEntry, ForwardBatch
from verify_kernels.gpu.quantized_weights import quantize_weight
from verify_kernels.reference.backend import ReferenceBackend

TOKENS = list(range(40, 50))


@pytest.mark.parametrize("act_order", [False, True])
def test_int4_checkpoints_run_unchanged(act_order: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Stacked matrices with different input orders cannot run as one, so these are stored in 16 bits."""
    scheme = Scheme("gptq", act_order=True) if act_order else Scheme("awq")
    folder, _ = write_folder(tmp_path, scheme, head_dim=64, num_hidden_layers=1)
    done: list[int] = []
    model = load_device_model(
        str(folder), dtype="fp16", cache_dir=tmp_path, device=place(), max_rows=16,
        progress=lambda _, *of: done.append(of[1] - of[0]),
    )  # fmt: skip
    assert len(done) == len(set(done)) == 5  # the linear layers, each of which takes the loading further
    assert done[-1] == 0
    layer = model.weights.layers[0]
    assert model.dtype == "int4"
    assert all(isinstance(linear, Int4Linear) for linear in (layer.qkv, layer.o, layer.down))
    assert isinstance(layer.gate_up, DenseLinear if act_order else Int4Linear)
    rows = HFCheckpoint(folder).open().rows("layers.0.q", 64, 128)
    assert torch.equal(layer.qkv.matrix(64, 128).cpu(), rows)  # what its kernel is compared with
    assert ("gate_up is held in 16 bits" in caplog.text) == act_order
    limits = {"max_rows": 16, "max_logit_rows": 16, "max_positions": 64}
    device = DeviceDecoder(model, 2, place(), max_entries=1, **limits)
    loaded = load_model(str(folder), dtype="fp32", cache_dir=tmp_path)
    host = Decoder(loaded.config, loaded.weights, ReferenceBackend(1), KvPool(loaded.config, 2), **limits)
    batch = ForwardBatch.build([BatchEntry(TOKENS, range(-1, 9), 0, [1])])
    got, expected = (decoder.forward(batch, range(10)).cpu() for decoder in (device, host))
    assert torch.linalg.norm(got - expected) <= 1e-2 * torch.linalg.norm(expected)


@pytest.mark.parametrize(("bits", "act_order"), [(4, False), (4, True), (8, False)])
def test_quantised_checkpoints_report_what_they_are_held_in_and_must_fit(
    bits: int, act_order: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheme = Scheme("gptq", bits=bits, act_order=act_order)
    folder, _ = write_folder(tmp_path, scheme, head_dim=64, num_hidden_layers=1)
    model = load_device_model(str(folder), dtype="fp16", cache_dir=tmp_path, device=place(), max_rows=16)
    layer = model.weights.layers[0]
    assert model.dtype == ("int4" if bits == 4 else "fp16")
    dense = [isinstance(linear, DenseLinear) for linear in layer.linears]
    assert dense == [bits == 8, bits == 8, bits == 8 or act_order, bits == 8]
    source, types = HFCheckpoint(folder).open(), DeviceTypes.of("fp16")
    sizes = [plan.rows * plan.columns for plan in linear_plans(model.config)[:-1]]
    held = sum(2 * size if wide else size // 2 + size // 32 * 4 for size, wide in zip(sizes, dense, strict=True))
    need = held + 2 * model.config.vocab_size * model.config.hidden_size
    for free, fits in ((need, True), (need - 1, False)):
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device, free=free: (free, free))
        with nullcontext() if fits else pytest.raises(ModelError, match="its weights need"):
            device_weights._check_memory(source, types, torch.device("cuda"))


def test_float8_layers_match_their_weights() -> None:
    """In float16 rows: bfloat16 ones, which a GPU uses, the interpreter multiplies wrongly."""
    config, generator = shape(n_layers=1, qkv_bias=False), torch.Generator().manual_seed(1)
    source = RandomSource("small", config, 0)
    types = DeviceTypes("fp8", torch.float16, fp8=True)
    down = WeightsReader(source, types, place(), 16, silent).read().layers[0].down
    assert isinstance(down, Fp8Linear)
    gate_up = torch.randn(5, 2 * config.intermediate_size, generator=generator).half()
    residual = torch.randn(5, config.hidden_size, generator=generator).half()
    out = torch.empty_like(residual, device=place())
    down.gated(gate_up.to(place()), "silu", out, residual.to(place()))
    q, scale = quantize_weight(source.rows("layers.0.down", 0, config.hidden_size).half())
    gate, up = gate_up.float().chunk(2, dim=1)
    expected = residual + (torch.nn.functional.silu(gate) * up) @ (q.float() * scale[:, None]).t()
    assert torch.linalg.norm(out.cpu() - expected) <= 4e-2 * torch.linalg.norm(expected - residual)
    assert down.nbytes == q.numel() + 4 * len(scale)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_weights_that_are_no_numbers_are_rejected(dtype: DeviceDtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_weights, "fused_rows", lambda *arguments: fused_rows(*arguments) / 0)
    source, types = RandomSource("small", shape(n_layers=1), 0), DeviceTypes.of(dtype)
    with pytest.raises(ModelError, match=r"small: tensor embed holds values that are no finite numbers"):
        WeightsReader(source, types, place(), 16, silent).read()


def test_unsupported_head_sizes_are_rejected(tmp_path: Path) -> None:
    narrow = shape(head_dim=16)
    with (
        mock.patch.dict(RANDOM_SHAPES, {"narrow": narrow}),
        pytest.raises(UnsupportedModelError, match=r"heads of 16 .* set engine\.device to cpu"),
    ):
        load_device_model("random:narrow", dtype="fp16", cache_dir=tmp_path, device=place(), max_rows=16)


def test_experts_are_rejected(tmp_path: Path) -> None:
    moe = shape(experts=4, experts_per_token=2)
    with (
        mock.patch.dict(RANDOM_SHAPES, {"moe": moe}),
        pytest.raises(UnsupportedModelError, match=r"experts runs on a CPU only; set engine\.device to `cpu`"),
    ):
        load_device_model("random:moe", dtype="fp16", cache_dir=tmp_path, device=place(), max_rows=16)


@pytest.mark.parametrize(("capability", "hip"), [((8, 9), None), ((9, 4), "6.2")], ids=["RTX 4090", "MI300"])
def test_a_gpu_without_float8_products_is_named(capability: tuple[int, int], hip: str | None, tmp_path: Path) -> None:
    """An MI300 has a float8 whose values are not those of the kernels'."""
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
        mock.patch.object(torch.version, "hip", hip),
        pytest.raises(ModelError, match=r"engine\.device_dtype: this GPU has no products of float8"),
    ):
        load_device_model("random:tiny", dtype="fp8", cache_dir=tmp_path, device=torch.device("cuda"), max_rows=16)


def test_equal_weights_have_one_digest(tmp_path: Path) -> None:
    """It decides whether another server may resume a stream."""
    digests = [
        load_device_model("random:tiny", dtype=dtype, cache_dir=tmp_path, device=place(), max_rows=16).digest
        for dtype in ("auto", "bf16", "fp16")
    ]
    assert digests[0] == digests[1] != digests[2]


def test_the_tiny_shape_runs_on_a_gpu(tmp_path: Path) -> None:
    model = load_device_model("random:tiny", dtype="fp16", cache_dir=tmp_path, device=place(), max_rows=16)
    decoder = DeviceDecoder(model, 2, place(), max_entries=1, max_rows=16, max_logit_rows=16, max_positions=64)
    batch = ForwardBatch.build([BatchEntry(TOKENS[:2], range(-1, 1), 0, [1])])
    assert torch.isfinite(decoder.forward(batch, range(2))).all()


def test_converting_threads_start_no_threads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen threads with sixteen each would fight over the cores; afterwards all is as it was."""
    seen: list[int] = []

    def noted(*arguments: Any) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return fused_rows(*arguments)

    monkeypatch.setattr(device_weights, "fused_rows", noted)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        source = RandomSource("small", shape(n_layers=1), 0)
        WeightsReader(source, DeviceTypes.of("fp16"), place(), 16, silent).read()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}
