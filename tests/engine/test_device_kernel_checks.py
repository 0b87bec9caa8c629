"""The self-test of GPU kernels: sound kernels pass; each planted fault falls back, or refuses the start by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from specdec.config import EngineConfig
from specdec.engine import build_device, device_kernel_checks
from specdec.engine.build_device import DevicePlatform
from specdec.engine.device_kernel_checks import check_kernels
from specdec.engine.device_verify import POLICIES
from specdec.errors import ConfigError, KernelError, ModelError
from specdec.models import device_decoder as network
from specdec.models import device_weights as layers
from specdec.models.device_decoder import DeviceDecoder
from tests.kernels.gpu.quick_interpreter import quick_interpreter
from tests.kernels.gpu.recorded_launches import RecordedLaunch, recorded_launches
from tests.models.device.small import device_decoder, host_decoder, shape
from verify_kernels.forward_batch import BatchEntry, ForwardBatch
from verify_kernels.gpu.kernel_launch import FP8
from verify_kernels.gpu.triton_sampling import TritonSampling
from verify_kernels.reference.sampling import ReferenceSampling

POSTED = {"n_layers": 1, "post_norms": True}


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_interpreter(), mock.patch.object(device_kernel_checks, "POLICIES", POLICIES[-1:]):
        yield


def small(dtype: str = "fp16", pages: int = 2, **changes: Any) -> DeviceDecoder:
    """Two pages and 16 rows leave the smallest steps, which the interpreter computes in a second."""
    sizes: dict[str, Any] = {"max_rows": 16, "max_logit_rows": 16, **changes}
    return device_decoder(shape(**POSTED), dtype, pages, **sizes)


@contextmanager
def only(family: str) -> Iterator[None]:
    """Only the checks of one family, for speed."""
    others = {"_forward_checks", "_layer_checks", "_verify_checks"} - {family}
    with mock.patch.multiple(device_kernel_checks, **{name: mock.Mock(return_value=()) for name in others}):
        yield


def off(function: Callable[..., Any], at: int = 0) -> Callable[..., Any]:
    """``function`` with one value of the tensor that it writes off."""

    def wrong(*args: Any, **named: Any) -> None:
        function(*args, **named)
        args[at].view(-1)[3] += 1

    return wrong


def test_sound_kernels_pass() -> None:
    """Two sequences in one step of attention, a tree, and every other kernel."""
    decoder = small(pages=6)
    assert check_kernels(decoder) == set()


def test_every_form_of_a_step_is_launched() -> None:
    """Kernels are recorded, not run: narrow and wide tiles, several sequences, fine and coarse plans, split layers."""
    changes = {"n_layers": 2, "n_heads": 16, "sliding_window": 100, "local_layers": (True, False)}
    decoder = device_decoder(shape(**changes), "fp16", 20, max_positions=1200)
    families = (
        device_kernel_checks._forward_checks,
        device_kernel_checks._layer_checks,
        device_kernel_checks._verify_checks,
    )
    checks = [check for family in families for check in family(decoder)]
    with recorded_launches() as launches:
        for check in checks:
            list(check.run())
    forms = {(v["BLOCK_M"], v["WINDOWED"]) for v in named(launches, "tree_attention_kernel")}
    assert {(64, True), (64, False), (128, False)} <= forms
    assert {v["SPLIT_K"] for v in named(launches, "linear_kernel")} == {1, 2}
    assert {v["BLOCK_M"] for v in named(launches, "linear_kernel")} == {16, 32, 64, 128}
    shapes = [check.shape for check in checks if check.kernel == "tree_attention"]
    assert sum("(0, 1), (70, 3), (130, 7)" in each for each in shapes) == 2  # with a window and without
    assert sum("coarse" in each for each in shapes) == 2
    assert len(launches) < 250


def named(launches: list[RecordedLaunch], kernel: str) -> list[Any]:
    return [launch.arguments for launch in launches if launch.kernel.__name__ == kernel]


FORWARD: list[tuple[str, Any, str, int]] = [
    ("norm_rows", device_kernel_checks, "norm_rows", 2),
    ("write_kv", network, "write_kv", 0),
    ("tree_attention", network, "tree_attention", 3),
]


@pytest.mark.parametrize(("kernel", "module", "name", "at"), FORWARD)
def test_a_fault_that_nothing_replaces_refuses_the_start(kernel: str, module: Any, name: str, at: int) -> None:
    with (
        mock.patch.object(module, name, off(getattr(module, name), at)),
        pytest.raises(
            KernelError, match=rf"GPU kernel {kernel} differs.* on .*(1\)\]|rows of 64).*; set engine.device to cpu"
        ),
    ):
        check_kernels(small())


def test_float8_keys_have_another_way_out() -> None:
    with (
        mock.patch.object(network, "tree_attention", side_effect=RuntimeError("out of resource: shared memory")),
        pytest.raises(
            KernelError, match=r"tree_attention fails on .*float8.*shared memory; set engine.kv_dtype to auto"
        ),
    ):
        check_kernels(small(kv_dtype=FP8))


LAYERS = [("linear", 2, "linear fp16"), ("norm_rows", 2, "norm_rows"), ("act_mul", 1, "act_mul")]


@pytest.mark.parametrize(("name", "at", "kernel"), LAYERS)
def test_a_wrong_layer_runs_in_plain_torch(name: str, at: int, kernel: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its kernels stay wrong, and the forward agrees with the CPU's all the same."""
    decoder = small()
    batch = ForwardBatch.build([BatchEntry([1, 2, 3], [-1, 0, 0], 0, [0])])
    want = host_decoder(shape(**POSTED)).forward(batch, [0, 1, 2]).clone()
    with only("_layer_checks"), mock.patch.object(layers, name, off(getattr(layers, name), at)):
        assert check_kernels(decoder) == {"layers"}
        found = decoder.forward(batch, [0, 1, 2])
    assert f"GPU kernel {kernel} differs from plain torch" in caplog.text
    assert float((found.cpu() - want).abs().max() / want.abs().max()) < 2e-2


def test_a_check_without_memory_says_nothing_about_the_kernel() -> None:
    """It refuses the start; the layers would need more memory in plain torch."""
    decoder = small()
    short = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a capacity of 23.99 GiB")
    with (
        only("_layer_checks"),
        mock.patch.object(build_device, "gpu_arithmetic"),
        mock.patch.object(build_device, "build_device_decoder", return_value=decoder),
        mock.patch.object(layers, "linear", side_effect=short),
    ):
        platform = DevicePlatform(EngineConfig(target="small"), torch.device("cuda"))
        with pytest.raises(
            ModelError, match=r"of the device: CUDA .* 2\.00 GiB; reduce engine\.kv_tokens, engine\.max"
        ):
            platform.target_decoder(decoder.model, 2, 64, ())


def test_what_is_not_finite_must_be_alike() -> None:
    wide = torch.randn(40, 3)
    assert device_kernel_checks._difference(wide, wide) == 0
    wide[20, 1] = -torch.inf
    assert device_kernel_checks._difference(wide, wide.clone()) == 0
    assert device_kernel_checks._difference(wide, torch.zeros(40, 3)) == float("inf")
    off = wide.clone()
    off[39, 2] += 1
    assert 0 < device_kernel_checks._difference(off, wide) <= 1 / float(wide[wide.isfinite()].abs().max()) + 1e-6


@pytest.mark.parametrize("dtype", ["fp16", "fp8"])
def test_plain_layers_stand_in_for_every_weight(dtype: str) -> None:
    decoder = small(dtype)
    (layer,) = decoder.model.weights.layers
    x = torch.randn(5, layer.down.k, generator=torch.Generator().manual_seed(1)).to(layer.attn_norm)
    outs = [torch.ones(5, layer.down.n).to(x) for _ in range(2)]
    for each, out in zip((layer.down, layers.ReferenceLinear(layer.down)), outs, strict=True):
        each.plain(x, out, out)
    assert float((outs[0] - outs[1]).abs().max() / outs[1].abs().max()) < (0.15 if dtype == "fp8" else 1e-2)


def wrong_token(self: TritonSampling, logits: Any, rows: Any) -> Any:
    return ReferenceSampling().sample(logits, rows) + 1


def wrong_path(*args: Any, **named: Any) -> None:
    args[5].counts.fill_(3)


VERIFY = [
    ("sampling", mock.patch.object(TritonSampling, "sample", wrong_token)),
    ("accept", mock.patch.object(device_kernel_checks, "accept", wrong_path)),
    ("move_kv", mock.patch.object(device_kernel_checks, "move_kv")),
]


@pytest.mark.parametrize(("kernel", "fault"), VERIFY)
def test_wrong_sampling_and_acceptance_fall_back(kernel: str, fault: Any, caplog: pytest.LogCaptureFixture) -> None:
    with only("_verify_checks"), fault:
        assert check_kernels(small()) == {"verify"}
    assert f"GPU kernel {kernel} differs from plain torch" in caplog.text


@pytest.mark.parametrize(
    ("failed", "mode", "plain"),
    [(set(), "bitwise", False), ({"layers"}, "numerical", False), ({"verify"}, "numerical", True)],
)
def test_the_platform_reports_a_fallback(failed: set[str], mode: str, plain: bool) -> None:
    decoder = small()
    with (
        mock.patch.object(build_device, "gpu_arithmetic"),
        mock.patch.object(build_device, "build_device_decoder", return_value=decoder),
        mock.patch.object(build_device, "device_self_test", return_value="bitwise"),
        mock.patch.object(build_device, "check_kernels", return_value=failed),
        mock.patch.object(build_device, "warm_up"),
    ):
        platform = DevicePlatform(EngineConfig(target="small"), torch.device("cuda"))
        assert platform.target_decoder(decoder.model, 2, 64, ()) is decoder
        assert platform.mode == mode
        assert isinstance(platform.sampling, ReferenceSampling) == plain
        assert (platform.verifier(decoder) is None) == plain
        strict = DevicePlatform(EngineConfig(target="small", strict=True), torch.device("cuda"))
        if failed:
            with pytest.raises(ConfigError, match=r"engine\.strict"):
                strict.target_decoder(decoder.model, 2, 64, ())
