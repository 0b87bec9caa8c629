"""Every Triton kernel beside its torch twin on shapes from small to large: `python -m tests.gpu_session.twins KERNEL`.

Needs torch, numpy and triton only. Each case runs twice, the second time on scratch memory filled with NaN, and must
give the same bits. The report is written around every case, so a case that kills the process is found by the next one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported

from tests.kernels.gpu.attention_steps import Geometry, Layer, Step
from tests.kernels.gpu.attention_steps import random_entries as attention_entries
from tests.kernels.gpu.device_rows import DeviceRows, choices, on, random_entries
from tests.kernels.gpu.linear_rows import random_int4, workspace
from tests.kernels.gpu.quick_interpreter import quick_interpreter
from tests.kernels.gpu.reference import attention as attention_twin
from tests.kernels.gpu.reference import linear as linear_twin
from tests.kernels.gpu.reference import row_ops as row_twin
from tests.kernels.gpu.reference.accept import accept as accept_twin
from tests.kernels.gpu.sampling_rows import differences, row
from verify_kernels.forward_batch import PAGE_SIZE
from verify_kernels.gpu.accept import AcceptResult, accept
from verify_kernels.gpu.act import act_mul
from verify_kernels.gpu.attention_plan import attention_plan
from verify_kernels.gpu.kernel_launch import FP8
from verify_kernels.gpu.kv_ops import move_kv, write_kv
from verify_kernels.gpu.linear import linear
from verify_kernels.gpu.linear_int4 import linear_int4
from verify_kernels.gpu.linear_plan import DENSE_KINDS, LinearKind
from verify_kernels.gpu.norm import norm_rows
from verify_kernels.gpu.quantize import PROLOGUES, quantize_rows
from verify_kernels.gpu.tree_attention import tree_attention
from verify_kernels.gpu.triton_sampling import TritonSampling

EPS = 1e-6
EXACT = 0.0
HALF_ERROR = 1e-2  # largest difference from the twin over the twin's largest value, of results in 16 bits
FP8_ERROR = 0.15  # of results in float8, which may round the other way


@dataclass(frozen=True, slots=True)
class Case:
    """One launch of a kernel. ``run`` launches it or its twin on fresh outputs and returns them by name."""

    shape: str
    run: Callable[[bool], Mapping[str, Tensor]]  # twin -> results
    error: float = HALF_ERROR  # allowed, over the twin's largest value
    scratch: Any = None  # whose float tensors may hold anything before a launch


Cases = Iterator[Case]


def row_type(device: torch.device) -> torch.dtype:
    """16-bit rows. The interpreter multiplies bfloat16 wrongly."""
    return torch.bfloat16 if device.type == "cuda" else torch.float16


def random(device: torch.device, dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Standard normal values, the same on any device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def norm_cases(device: torch.device) -> Cases:
    """Rows up to the widest, stored and added."""
    dtype = row_type(device)
    for hidden in (64, 896, 1025, 1536, 3584, 4096, 8192, 8200, 16384):
        for rows in (1, 65):
            for adds in (False, True):
                x, start, weight = (random(device, dtype, rows, hidden, seed=seed) for seed in range(3))

                def run(
                    twin: bool, x: Tensor = x, start: Tensor = start, weight: Tensor = weight, adds: bool = adds
                ) -> dict[str, Tensor]:
                    out = start.clone()
                    (row_twin.norm_rows if twin else norm_rows)(x, weight[0], out, eps=EPS, adds=adds)
                    return {"out": out}

                yield Case(f"{rows} rows of {hidden}{', added' * adds}", run)


def act_cases(device: torch.device) -> Cases:
    """Both gates at the widths of real models."""
    for width in (96, 1025, 4864, 8960, 14336):
        for kind in ("silu", "gelu"):
            gate_up = random(device, row_type(device), 9, 2 * width)

            def run(twin: bool, gate_up: Tensor = gate_up, kind: Any = kind) -> dict[str, Tensor]:
                out = torch.full_like(gate_up[:, : gate_up.shape[1] // 2], torch.nan).contiguous()
                (row_twin.act_mul if twin else act_mul)(gate_up, out, kind)
                return {"out": out}

            yield Case(f"9 rows of {width}, {kind}", run)


def quantize_cases(device: torch.device) -> Cases:
    """Every prologue; dequantised values are compared."""
    for k in (64, 1100, 1536, 4096, 14336):
        for prologue in PROLOGUES:
            width = 2 * k if prologue in ("silu", "gelu") else k
            x, norm = random(device, row_type(device), 5, width), random(device, row_type(device), k, seed=1)

            def run(
                twin: bool, x: Tensor = x, norm: Tensor = norm, prologue: Any = prologue, k: int = k
            ) -> dict[str, Tensor]:
                q, scale = torch.zeros(5, k, dtype=FP8, device=device), torch.full((5,), torch.nan, device=device)
                kernel = row_twin.quantize_rows if twin else quantize_rows
                kernel(x, q, scale, prologue=prologue, norm=norm if prologue == "rms" else None, eps=EPS)
                return {"values": q.float() * scale[:, None], "scale": scale}

            yield Case(f"5 rows of {k}, {prologue}", run, FP8_ERROR)


def linear_cases(device: torch.device) -> Cases:
    """Every tile, whole, in splits side by side and in sequence; then the layers of real models."""
    yield from _linear_cases(device, DENSE_KINDS[row_type(device)])


def fp8_cases(device: torch.device) -> Cases:
    """As `linear_cases`, rows and weights in float8."""
    yield from _linear_cases(device, "fp8")


def int4_cases(device: torch.device) -> Cases:
    """As `linear_cases`, weights in 4 bits, with and without an input order of their own."""
    yield from _linear_cases(device, "int4")


SMALL_LAYERS = ((40, 96), (70, 1040), (130, 2048))  # n, k; the last two are split
REAL_LAYERS = ((896, 4864), (1536, 8960), (2048, 1536), (4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336))
ROWS = (1, 16, 17, 33, 65, 129, 300)  # of every tile, and of a second one


def _linear_cases(device: torch.device, kind: LinearKind) -> Cases:
    for n, k in (*SMALL_LAYERS, *REAL_LAYERS):
        for permuted in (False, True) if kind == "int4" and (n, k) in SMALL_LAYERS else (False,):
            space = workspace(n, k, kind, device, permuted=row_type(device) if permuted else None)
            layer = _layer(n, k, kind, permuted, device)
            for rows in ROWS:
                run = _linear_run(layer, rows, n, k, space)
                yield Case(f"{rows} rows, n {n}, k {k}{', permuted' * permuted}", run, HALF_ERROR, space)


def _layer(n: int, k: int, kind: LinearKind, permuted: bool, device: torch.device) -> Callable[..., None]:
    """The layer's kernel or twin with its weight: (twin, x, out, workspace, residual)."""
    if kind == "int4":
        weight, _ = random_int4(n, k, 128, torch.Generator().manual_seed(1), device, perm=permuted)

        def int4(twin: bool, x: Tensor, out: Tensor, **rest: Any) -> None:
            (linear_twin.linear_int4 if twin else linear_int4)(x, weight, out, **rest)

        return int4
    dense = random(device, torch.float32, n, k, seed=1)
    if kind == "fp8":
        q, scale = torch.zeros(n, k, dtype=FP8, device=device), torch.zeros(n, device=device)
        row_twin.quantize_rows(dense, q, scale)

        def fp8(twin: bool, x: Tensor, out: Tensor, **rest: Any) -> None:
            rows, x_scale = torch.zeros(x.shape, dtype=FP8, device=device), torch.zeros(x.shape[0], device=device)
            row_twin.quantize_rows(x, rows, x_scale)
            (linear_twin.linear if twin else linear)(rows, q, out, scales=(x_scale, scale), **rest)

        return fp8
    half = dense.to(row_type(device))

    def plain(twin: bool, x: Tensor, out: Tensor, **rest: Any) -> None:
        (linear_twin.linear if twin else linear)(x, half, out, **rest)

    return plain


def _linear_run(layer: Callable[..., None], rows: int, n: int, k: int, space: Any) -> Any:
    device = space.partials.device
    x, residual = random(device, row_type(device), rows, k, seed=2), random(device, row_type(device), rows, n, seed=3)

    def run(twin: bool) -> dict[str, Tensor]:
        out = torch.full((rows, n), torch.nan, device=device)
        layer(twin, x, out, workspace=space, residual=residual)
        return {"out": out}

    return run


STEPS: tuple[tuple[tuple[int, int, int], ...], ...] = (  # (context, chain rows, nodes) of each entry
    ((0, 0, 0),), ((63, 0, 1),), ((64, 0, 7),), ((300, 0, 0), (0, 5, 3)), ((1100, 0, 15),), ((1030, 2, 63),),
    ((0, 300, 0),), ((4096, 0, 15),), ((700, 0, 7),) * 8, ((16384, 0, 63),), ((2048, 500, 0), (5000, 0, 31)),
)  # fmt: skip


def attention_cases(device: torch.device) -> Cases:
    """The plan and attention: every head size, KV in 16 bits and float8, windows, several entries, wide steps."""
    half = row_type(device)
    geometries = [Geometry(4, 2, head_dim, half) for head_dim in (64, 80, 96, 128, 256)]
    geometries += [Geometry(4, 2, head_dim, half, fp8=True) for head_dim in (64, 128, 256)]
    geometries += [Geometry(4, 2, 64, half, window=50), Geometry(4, 2, 128, half, window=1000, fp8=True)]
    geometries += [Geometry(32, 8, 128, half), Geometry(28, 4, 128, half), Geometry(14, 2, 64, half)]
    for shapes in STEPS:
        for geometry in geometries:
            case = _attention_case(geometry, shapes, device)
            heads = f"heads {geometry.heads}/{geometry.kv_heads} x {geometry.head_dim}"
            kind = f"{', fp8 KV' * geometry.fp8}{f', window {geometry.window}' if geometry.window else ''}"
            yield Case(f"{_described(shapes)}, {heads}{kind}", case[0], 4e-2, case[1])


def _described(shapes: tuple[tuple[int, int, int], ...]) -> str:
    return (
        "entries (context, chain, nodes) " + " ".join(str(shape) for shape in shapes[:2]) + " ..." * (len(shapes) > 2)
    )


def _attention_case(geometry: Geometry, shapes: Any, device: torch.device) -> tuple[Any, Any]:
    pages = sum(-(-(ctx + chain + nodes + 1) // PAGE_SIZE) for ctx, chain, nodes in shapes)
    step = Step.of(attention_entries(np.random.default_rng(1), shapes, pages), device)
    layer = Layer.random(geometry, step.rows, pages, 1, device)
    room = {"max_rows": 640, "max_entries": len(shapes), "max_pages": pages, "max_branch": 128}
    spaces = [geometry.workspace(device, **room) for _ in range(2)]

    def run(twin: bool) -> dict[str, Tensor]:
        space = spaces[twin]
        (attention_twin.attention_plan if twin else attention_plan)(step, space)
        works = space.work[: int(space.header[0])].clone()
        out = torch.full_like(layer.q, torch.nan)
        (attention_twin.tree_attention if twin else tree_attention)(
            layer.q, layer.k_pool, layer.v_pool, out, step, space, scale=layer.scale, window=geometry.window,
        )  # fmt: skip
        return {"plan": works, "out": out}

    return run, spaces[0]


def write_kv_cases(device: torch.device) -> Cases:
    """KV writes with rotary embedding, with norms and float8 pools."""
    for head_dim in (64, 80, 96, 128, 256):
        for fp8 in (False, True):
            for norms in (False, True):
                run = _write_run(head_dim, fp8, norms, device)
                yield Case(
                    f"head_dim {head_dim}{', fp8 KV' * fp8}{', norms' * norms}", run, FP8_ERROR if fp8 else HALF_ERROR
                )


def _write_run(head_dim: int, fp8: bool, norms: bool, device: torch.device) -> Any:
    dtype, heads, kv_heads, pages = row_type(device), 3, 1, 12
    entries, roots = random_entries(np.random.default_rng(1), [(126, 0, 5), (0, 3, 1), (64, 0, 0)], pages)
    rows = DeviceRows.build(entries, roots, device, pad_rows=3, pad_entries=1)
    qkv = random(device, dtype, rows.tokens.shape[0], (heads + 2 * kv_heads) * head_dim)
    angles = random(device, torch.float32, 400, head_dim // 2, seed=1)
    cos, sin = angles.cos(), angles.sin()
    weights = random(device, dtype, 2, head_dim, seed=2)
    extra: dict[str, Any] = {"q_norm": weights[0], "k_norm": weights[1]} if norms else {}

    def run(twin: bool) -> dict[str, Tensor]:
        q_out = torch.full((rows.tokens.shape[0], heads, head_dim), 7.0, dtype=dtype, device=device)
        shape = (pages, kv_heads, PAGE_SIZE, head_dim)
        pools = [torch.full(shape, 7.0, device=device).to(FP8 if fp8 else dtype) for _ in "kv"]
        kernel = attention_twin.write_kv if twin else write_kv
        kernel(qkv, q_out, *pools, cos, sin, rows, eps=EPS, **extra)
        return {"q": q_out, "k": pools[0].float(), "v": pools[1].float()}

    return run


def accept_cases(device: torch.device) -> Cases:
    """Acceptance and the moves of accepted KV, whose results are integers and bytes."""
    for shapes in (((3, 0, 0),), ((60, 0, 5),), ((60, 1, 9), (5, 4, -1)), ((126, 0, 62),), ((700, 0, 30),) * 8):
        yield Case(_described(shapes), _accept_run(shapes, device), EXACT)


def _accept_run(shapes: Any, device: torch.device) -> Any:
    pages, rng = 128, np.random.default_rng(1)
    entries, roots = random_entries(rng, shapes, pages, vocab=4)
    rows = DeviceRows.build(entries, roots, device)
    sampled = on(device, [t for e, root in zip(entries, roots, strict=True) for t in choices(rng, e, root, 4)])
    pool = torch.randint(0, 256, (2, pages, 3, PAGE_SIZE, 160), generator=torch.Generator().manual_seed(0))

    def run(twin: bool) -> dict[str, Tensor]:
        result = AcceptResult.allocate(len(entries), 63, device)
        kernel = accept_twin if twin else accept
        starts = rows.entry_start[:-1] + rows.root_row
        kernel(rows, rows.root_row, rows.tokens, sampled, starts, result, n_pages=pages)
        pools = [pool.to(torch.uint8).view(torch.float16).to(device) for _ in "kv"]
        (attention_twin.move_kv if twin else move_kv)(*pools, result.move_source, result.move_target, result.n_moves)
        found = {name: getattr(result, name).clone() for name in ("counts", "rows", "emitted")}
        return found | {"k": pools[0].view(torch.uint8), "v": pools[1].view(torch.uint8)}

    return run


POLICIES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {}, {"top_p": 0.95}, {"top_k": 50}, {"top_k": 7, "top_p": 0.8, "min_p": 0.01},
)  # fmt: skip


def sampling_cases(device: torch.device) -> Cases:
    """Tokens and log-probabilities, bit by bit those of the numpy oracle."""
    kernels = TritonSampling(device)
    for vocab in (100, 384, 5000, 70_001, 128_256, 151_936):
        logits = torch.randn(len(POLICIES), vocab, generator=torch.Generator().manual_seed(3)) * 6
        rows = [row(seed=i, **policy) for i, policy in enumerate(POLICIES)]

        def run(twin: bool, logits: Tensor = logits, rows: Any = rows) -> dict[str, Tensor]:
            wrong = [] if twin else differences(kernels, logits, rows, 4)
            if wrong:
                raise AssertionError("; ".join(wrong))
            return {"differences": torch.zeros(1)}

        yield Case(f"5 rows, vocabulary {vocab}", run, EXACT)


KERNELS: dict[str, Callable[[torch.device], Cases]] = {
    "norm": norm_cases, "act": act_cases, "quantize": quantize_cases,
    "write_kv": write_kv_cases, "accept": accept_cases, "attention": attention_cases,
    "linear": linear_cases, "linear_fp8": fp8_cases, "linear_int4": int4_cases, "sampling": sampling_cases,
}  # fmt: skip


def largest_error(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    """The largest difference over the twin's largest finite value; infinity where only one of the two is finite."""
    worst = 0.0
    for name, twin in want.items():
        ours, theirs = got[name].double(), twin.double()
        if ours.shape != theirs.shape or not torch.equal(ours.isfinite(), theirs.isfinite()):
            return float("inf")
        finite = theirs.isfinite()
        if finite.any():
            scale = max(float(theirs[finite].abs().max()), 1e-30)
            worst = max(worst, float((ours - theirs)[finite].abs().max()) / scale)
    return worst


def poison(scratch: Any) -> None:
    """Fill the float tensors of a dataclass with NaN."""
    if is_dataclass(scratch):
        for field in fields(scratch):
            value = getattr(scratch, field.name)
            if isinstance(value, Tensor) and value.is_floating_point():
                value.fill_(torch.nan)


def judge(case: Case) -> dict[str, Any]:
    """Run ``case`` twice and its twin once: its status, error, and what is wrong."""
    got = {name: tensor.clone() for name, tensor in case.run(False).items()}
    error = largest_error(got, case.run(True))
    poison(case.scratch)
    again = case.run(False)
    wrong = []
    if not error <= case.error:
        wrong.append(f"differs from its twin by {error:.3g} of the largest value, {case.error:g} allowed")
    if largest_error(again, got) != 0:
        wrong.append("other bits on scratch memory filled with NaN")
    return {"status": "failed" if wrong else "passed", "error": error, "message": "; ".join(wrong)}


CASE_LIMIT_S = 150.0  # compilation included; a kernel that hangs is ended by then


def run_cases(
    kernel: str, device: torch.device, file: Path, most: int | None = None, limit_s: float = CASE_LIMIT_S
) -> bool:
    """Judge the kernel's cases that ``file`` lacks; returns whether all pass.

    A case under way in the file killed an earlier process. most: number of cases; None: all. limit_s: seconds of a
    case, after which the process ends.
    """
    done: list[dict[str, Any]] = json.loads(file.read_text())["cases"] if file.exists() else []
    for entry in done:
        if entry["status"] == "running":
            entry |= {"status": "failed", "message": "the process died or hung"}
    known = {entry["shape"] for entry in done}
    for number, case in enumerate(KERNELS[kernel](device)):
        if most is not None and number >= most:
            break
        if case.shape in known:
            continue
        entry = {"shape": case.shape, "status": "running", "error": None, "message": ""}
        done.append(entry)
        _write(file, kernel, done)
        watchdog = threading.Timer(limit_s, os._exit, (3,))
        watchdog.daemon = True
        watchdog.start()
        began = time.monotonic()
        try:
            entry |= judge(case)
        except Exception as error:
            entry |= {"status": "failed", "message": f"{type(error).__name__}: {error}"[:500]}
            if device.type == "cuda" and "CUDA" in str(error):  # no later call of this process would work
                entry["seconds"] = round(time.monotonic() - began, 2)
                _write(file, kernel, done)
                os._exit(3)
        finally:
            watchdog.cancel()
        entry["seconds"] = round(time.monotonic() - began, 2)
        _write(file, kernel, done)
    _write(file, kernel, done)
    return all(entry["status"] == "passed" for entry in done)


def _write(file: Path, kernel: str, cases: list[dict[str, Any]]) -> None:
    failing = [entry for entry in cases if entry["status"] == "failed"]
    errors = [entry["error"] for entry in cases if entry["error"] is not None]
    report = {
        "kernel": kernel, "passed": sum(entry["status"] == "passed" for entry in cases), "failed": len(failing),
        "largest_error": max(errors, default=None), "smallest_failing": failing[0] if failing else None, "cases": cases,
    }  # fmt: skip
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(report), encoding="utf-8")
    partial.replace(file)


def main() -> int:
    """Returns 0 if all cases pass, 1 if some fail."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_session.twins", description=__doc__)
    parser.add_argument("kernel", choices=sorted(KERNELS))
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="the report, and the cases done")
    parser.add_argument("--most", type=int, metavar="N", help="only the N smallest cases")
    parser.add_argument("--case-limit", type=float, default=CASE_LIMIT_S, metavar="S", help="seconds of a case")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    with nullcontext() if on_gpu else quick_interpreter():
        passed = run_cases(
            options.kernel, torch.device("cuda" if on_gpu else "cpu"), options.json, options.most, options.case_limit
        )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
