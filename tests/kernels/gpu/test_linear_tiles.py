"""Orders, tiles and scratch of the linear kernels: the row count does not change a result's bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verify_kernels.gpu.kernel_launch import chip_of
from verify_kernels.gpu.linear_plan import (
    FULL_CHIP,
    MIN_BLOCKS,
    LinearKind,
    LinearLaunch,
    LinearWorkspace,
    block_k_of,
    plan_launch,
    reduction_order,
    tiles_of,
)

KINDS: tuple[LinearKind, ...] = ("bf16", "fp16", "fp32", "fp8", "int4")
TENSOR_CORE_KINDS: tuple[LinearKind, ...] = ("bf16", "fp16", "fp8", "int4")
shapes = st.tuples(st.integers(1, 160_000), st.integers(1, 30_000))
kinds = st.sampled_from(KINDS)

# The instructions of every compiled linear kernel that multiply, by case.
KINDS_OF_INSTRUCTION = """
import json, re, sys, triton
from importlib import import_module
from verify_kernels.gpu.aot.jobs import TARGETS, kernel_source
wanted, target = json.loads(sys.argv[1]), TARGETS["sm_90"]
found = {}
for module in ("linear", "linear_int4"):
    for case in import_module(f"verify_kernels.gpu.{module}").compile_cases():
        if target.runs(case) and (not wanted or case.name in wanted):
            ptx = triton.compile(kernel_source(case), target=target.gpu, options=dict(case.options)).asm["ptx"]
            kinds = sorted(set(re.findall(r"(wgmma.mma_async|mma.sync)\\S*?\\.(m\\d+)", ptx)))
            found[case.name] = [kinds, "cp.async.cg" in ptx]
print(json.dumps(found))
"""


@given(shape=shapes, kind=kinds, rows=st.lists(st.integers(1, 5000), min_size=2, max_size=8))
def test_the_order_depends_on_the_weights_alone(shape: tuple[int, int], kind: LinearKind, rows: list[int]) -> None:
    assert {plan_launch(count, *shape, kind).order for count in rows} == {reduction_order(*shape, kind)}


@given(shape=shapes, kind=kinds, rows=st.integers(1, 5000))
def test_tiles_cover_the_result_and_fill_the_chip_if_possible(
    shape: tuple[int, int], kind: LinearKind, rows: int
) -> None:
    n, k = shape
    launch = plan_launch(rows, n, k, kind)
    assert launch.m_tiles * launch.tile.block_m >= rows > (launch.m_tiles - 1) * launch.tile.block_m
    assert launch.n_tiles * launch.tile.block_n >= n > (launch.n_tiles - 1) * launch.tile.block_n
    if launch.in_sequence:
        assert launch.grid[0] >= FULL_CHIP
    if launch.order.split_k > 1:
        assert -(-k // launch.order.block_k) // launch.order.split_k >= MIN_BLOCKS[kind]
        assert reduction_order(n, k, kind).split_k == launch.order.split_k


@pytest.mark.parametrize("kind", ["fp8", "int4"])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (6144, 4096), (3584, 3584), (4608, 3584), (3584, 18944)])
def test_layers_of_a_small_model_fill_the_chip_at_one_row(kind: LinearKind, n: int, k: int) -> None:
    launch = plan_launch(1, n, k, kind)
    assert -(-n // tiles_of(kind)[0].block_n) * launch.order.split_k >= FULL_CHIP
    assert launch.grid[0] * launch.grid[1] >= FULL_CHIP


def test_splits_run_in_sequence_if_rows_fill_the_chip() -> None:
    assert plan_launch(2048, 4096, 4096, "fp8").in_sequence
    assert not plan_launch(16, 4096, 4096, "fp8").in_sequence


@pytest.mark.parametrize("kind", TENSOR_CORE_KINDS)
def test_every_tile_is_wide_enough_for_one_kind_of_instruction(kind: LinearKind) -> None:
    for tile in tiles_of(kind):
        assert (tile.block_n % 64, tile.num_warps % 4, tile.block_m % 16) == (0, 0, 0)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_a_block_of_int4_has_whole_groups_and_no_nibble_straddles_one(group: int) -> None:
    block = block_k_of("int4", group)
    assert block % group == 0
    assert group % (block // 4) == 0


@settings(max_examples=20)
@given(
    layers=st.lists(
        st.tuples(st.integers(1, 9000), st.integers(1, 9000), kinds, st.sampled_from((32, 64, 128))), max_size=4
    ),
    max_rows=st.integers(1, 600),
    share=st.floats(0, 1),
)
def test_scratch_is_enough_for_any_rows(
    layers: list[tuple[int, int, LinearKind, int]], max_rows: int, share: float
) -> None:
    meta = torch.device("meta")
    space = LinearWorkspace.for_layers(layers, max_rows, meta, torch.float16)
    rows = max(1, round(share * max_rows))
    for n, k, kind, group in layers:
        launch = plan_launch(rows, n, k, kind, group)
        assert space.partials.numel() >= launch.partials
        assert space.counters.numel() >= launch.counters
        assert space.permuted is not None
        assert space.permuted.numel() >= rows * k


def test_amd_pins_the_instruction_and_the_depth() -> None:
    launch: LinearLaunch = plan_launch(1, 4096, 4096, "bf16")
    assert launch.options("gfx942") == {"num_warps": 4, "num_stages": 2, "matrix_instr_nonkdim": 16}
    assert launch.options("sm_90") == {"num_warps": 4, "num_stages": 9}


@pytest.mark.parametrize(
    ("capability", "chip"),
    [((8, 0), "sm_80"), ((8, 6), "sm_89"), ((8, 7), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90"), ((10, 0), "sm_100"),
     ((11, 0), "sm_100"), ((12, 0), "sm_120")],
)  # fmt: skip
def test_each_card_has_the_tiles_of_a_chip(capability: tuple[int, int], chip: str) -> None:
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
        assert chip_of.__wrapped__(torch.device("cuda")) == chip


def test_pipelines_fit_the_shared_memory_of_small_cards() -> None:
    """128 bytes of each row and each column per stage."""
    for tile in tiles_of("bf16"):
        options = LinearLaunch(reduction_order(4096, 4096, "bf16"), tile, 1, 1, False).options("sm_120")
        assert options["num_stages"] * (tile.block_m + tile.block_n) * 128 <= 99 * 1024


def test_one_kind_of_instruction_from_one_row_to_many() -> None:
    check_instructions(
        ["bf16 16x64 by 9 nvidia", "bf16 128x128 by 4 nvidia", "bf16 fp16 scales, group 128 16x128 by 4 nvidia"], 3
    )


@pytest.mark.slow
def test_one_kind_of_instruction_in_every_case() -> None:
    check_instructions([], 100)


def check_instructions(names: list[str], at_least: int) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", KINDS_OF_INSTRUCTION, json.dumps(names)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert len(found) >= at_least
    for name, (kinds_found, asynchronous) in found.items():
        assert kinds_found == [["wgmma.mma_async", "m64"]], name
        assert asynchronous or "odd" in name, name
