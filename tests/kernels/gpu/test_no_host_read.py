"""No launcher reads the device: the mode that proves it, the launchers under it, and their sources."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.kernels.gpu.no_host_read import READS, HostReadError, NoHostRead

GPU = Path(__file__).parents[3] / "verify_kernels" / "gpu"
# Modules that pack, fill or test on the host, outside a step
HOST_SIDE = {
    "sampling_table.py": "lays out the host's arrays and fills its buffer before it is copied up",
    "triton_sampling.py": "hands results to the host, as its protocol asks",
}
WAITING_CALLS = (*READS, "synchronize", "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "equal")


@triton.jit
def _double_kernel(x, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i) * 2)


class Tensors:
    """The tensors of a step: values, their indices, a mask, one number."""

    def __init__(self, device: str | torch.device) -> None:
        self.x = torch.ones(4, 8, device=device)
        self.i = torch.arange(4, device=device)
        self.mask = torch.ones(4, dtype=torch.bool, device=device)
        self.n = torch.tensor(3, device=device)


READING: dict[str, Callable[[Tensors], object]] = {
    "item": lambda t: t.n.item(),
    "tolist": lambda t: t.i.tolist(),
    "numpy": lambda t: t.x.numpy(),
    "asarray": lambda t: np.asarray(t.x),
    "cpu": lambda t: t.x.cpu(),
    "if": lambda t: 1 if t.n > 2 else 0,
    "all": lambda t: bool((t.i >= 0).all()),
    "int": lambda t: int(t.n),
    "float": lambda t: float(t.n),
    "range": lambda t: range(t.n),  # type: ignore[call-overload]
    "slice": lambda t: t.x[: t.n],
    "list index": lambda t: [1, 2, 3, 4][t.n],  # type: ignore[call-overload]
    "in": lambda t: 3 in t.i,
    "any": lambda t: any(t.i > 2),
    "max": lambda t: max(t.i),
    "format": lambda t: f"{t.n}",
    "repr": lambda t: repr(t.i),
    "nonzero": lambda t: t.i.nonzero(),
    "where": lambda t: torch.where(t.mask),
    "masked_select": lambda t: torch.masked_select(t.x, t.mask[:, None]),
    "mask as index": lambda t: t.x[t.mask],
    "mask as target": lambda t: t.x.__setitem__(t.mask, 1.0),
    "unique": lambda t: torch.unique(t.i),
    "bincount": lambda t: torch.bincount(t.i),
    "repeats": lambda t: torch.repeat_interleave(t.x, t.i, dim=0),
    "equal": lambda t: torch.equal(t.i, t.i),
    "allclose": lambda t: torch.allclose(t.x, t.x),
    "full": lambda t: torch.full((2,), t.n),  # type: ignore[call-overload]
    "synchronize": lambda t: torch.cuda.synchronize(),
    "event": lambda t: torch.cuda.Event.synchronize(None),  # type: ignore[arg-type]
    "stream": lambda t: torch.cuda.Stream.synchronize(None),  # type: ignore[arg-type]
}
CROSSING: dict[str, Callable[[Tensors], object]] = {
    "to": lambda t: t.x.to("cpu"),
    "to without waiting": lambda t: t.x.to("cpu", non_blocking=True),
    "copy": lambda t: torch.empty(4, 8).copy_(t.x),
    "copy without waiting, not pinned": lambda t: torch.empty(4, 8).copy_(t.x, non_blocking=True),
}
HARMLESS: dict[str, Callable[[Tensors], object]] = {
    "gather": lambda t: t.x[t.i],
    "put": lambda t: t.x.index_put_((t.i,), t.x.clone()),
    "where": lambda t: torch.where(t.mask[:, None], t.x, 0.0),
    "masked_fill": lambda t: t.x.masked_fill_(t.mask[:, None], 0.0),
    "slices": lambda t: (t.x[:2, 3:], t.x[0], t.x[None], t.i.unbind()),
    "shapes": lambda t: (t.x.shape[0], t.x.stride(), t.x.numel(), len(t.x), t.x.data_ptr() % 16),
    "casts": lambda t: (t.x.to(torch.bfloat16), t.x.to(t.x.device), t.x.view(torch.int32)),
    "new": lambda t: (torch.zeros(3, device=t.x.device), torch.empty_like(t.x), t.x.new_empty(2)),
    "known repeats": lambda t: torch.repeat_interleave(t.x, torch.ones_like(t.i), dim=0, output_size=4),
    "copy on the device": lambda t: t.x.copy_(t.x.clone()),
    "from the host": lambda t: torch.empty_like(t.x).copy_(torch.ones(4, 8)),
}


@pytest.mark.parametrize("place", ["meta", "cpu"])
@pytest.mark.parametrize("how", READING)
def test_reads_are_errors(how: str, place: str) -> None:
    tensors = Tensors(place)
    with pytest.raises(HostReadError), NoHostRead(place):
        READING[how](tensors)


@pytest.mark.parametrize("how", CROSSING)
def test_copies_to_the_host_are_errors(how: str) -> None:
    tensors = Tensors("meta")
    with pytest.raises(HostReadError), NoHostRead("meta"):
        CROSSING[how](tensors)


@pytest.mark.parametrize("place", ["meta", "cpu"])
@pytest.mark.parametrize("how", HARMLESS)
def test_work_on_the_device_is_allowed(how: str, place: str) -> None:
    tensors = Tensors(place)
    with NoHostRead(place):
        HARMLESS[how](tensors)


def test_tensors_of_the_host_may_be_read() -> None:
    host, device = torch.ones(3), torch.ones(3, device="meta")
    with NoHostRead("meta"):
        assert host.sum().item() == 3
        assert host.nonzero().tolist() == [[0], [1], [2]]
        assert host.to("cpu") is host
        with pytest.raises(HostReadError, match=r"Tensor.item\(\) on meta"):
            device.sum().item()


def test_results_may_be_copied_to_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    host, device = torch.empty(3), torch.ones(3, device="meta")
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: tensor is host)
    rule = NoHostRead("meta")
    copy = torch.ops.aten.copy_.default
    rule.check_operator(copy, (host, device, True), {})
    rule.check_operator(copy, (host, device), {"non_blocking": True})
    for args, kwargs in (((host, device), {}), ((host, device, False), {}), ((torch.empty(3), device, True), {})):
        with pytest.raises(HostReadError, match="waits for it"):
            rule.check_operator(copy, args, kwargs)


def test_a_pause_lets_the_host_read_and_ends() -> None:
    values = torch.arange(3)
    with NoHostRead("cpu") as rule:
        with rule.paused():
            assert values.tolist() == [0, 1, 2]
            with pytest.raises(ZeroDivisionError), rule.paused():
                values.sum().item() / 0
            assert values.nonzero().shape == (2, 1)
        with pytest.raises(HostReadError):
            values.tolist()
    assert values.tolist() == [0, 1, 2]


def test_kernels_run_under_the_mode(device: torch.device) -> None:
    x, out = torch.arange(16.0, device=device), torch.zeros(16, device=device)
    with NoHostRead(device.type):
        _double_kernel[(1,)](x, out, SIZE=16)
        with pytest.raises(HostReadError):
            out.sum().item()
    assert out.tolist() == [2.0 * i for i in range(16)]


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    values, pinned = torch.arange(3, device="cuda"), torch.empty(3, dtype=torch.int64, pin_memory=True)
    with NoHostRead("cuda") as rule:
        pinned.copy_(values, non_blocking=True)
        for read in (*READING.values(), *CROSSING.values()):
            with pytest.raises(HostReadError):
                read(Tensors("cuda"))
        for work in HARMLESS.values():
            work(Tensors("cuda"))
        with rule.paused():
            torch.cuda.synchronize()
            assert pinned.tolist() == [0, 1, 2]


def waiting_calls(source: str) -> list[str]:
    """Calls by name, as "line: name", that make the host wait for values of the device."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    found = [(call.lineno, call.func.attr) for call in calls if isinstance(call.func, ast.Attribute)]
    found += [
        (call.lineno, "to('cpu')")
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "to"
        for argument in (*call.args, *(keyword.value for keyword in call.keywords))
        if isinstance(argument, ast.Constant) and argument.value == "cpu"
    ]
    return [f"{line}: {name}" for line, name in sorted(found) if name in WAITING_CALLS or name == "to('cpu')"]


@pytest.mark.parametrize("path", sorted(GPU.glob("*.py")), ids=lambda path: path.name)
def test_sources_contain_no_blocking_call(path: Path) -> None:
    found = waiting_calls(path.read_text(encoding="utf-8"))
    assert bool(found) == (path.name in HOST_SIDE), found


@pytest.mark.parametrize(
    "line",
    ["x.item()", "n = int(counts.max().item())", "x.to('cpu')", "x.to(device='cpu')", "torch.cuda.synchronize()",
     "torch.nonzero(x)", "y = [v for v in x.tolist()]", "lambda: x.cpu().numpy()", "torch.equal(a, b)"],
)  # fmt: skip
def test_the_scan_detects_blocking_calls(line: str) -> None:
    assert waiting_calls(f"def f(x):\n    if x:\n        {line}\n")
    assert not waiting_calls("def f(x):\n    return torch.where(x, x.to(torch.int8), x.item_size)\n")
