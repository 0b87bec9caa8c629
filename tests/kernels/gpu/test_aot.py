"""Ahead-of-time compilation: all kernels compile for the chips, and faults are found and named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kernels.gpu import aot_planted
from verify_kernels.gpu.aot.__main__ import main
from verify_kernels.gpu.aot.jobs import KERNEL_MODULES, TARGETS, Job, Usage, covering, load_cases, plan_jobs, read_usage
from verify_kernels.gpu.kernel_launch import CompileCase

PLANTED = aot_planted.__name__
KIB = 1024
SOUND = Usage(threads=128, registers=64, spills=0, shared=0, scratch=0, tensor_memory=0)


def compile_all(*arguments: str, modules: tuple[str, ...] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a process in which kernels are compiled, not interpreted."""
    launch = ["-m", "verify_kernels.gpu.aot"]
    if modules is not None:
        script = (
            f"import sys; from verify_kernels.gpu.aot.__main__ import main; sys.exit(main(sys.argv[1:], {modules!r}))"
        )
        launch = ["-c", script]
    return run_uninterpreted(*launch, *arguments)


def run_uninterpreted(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    file = tmp_path_factory.mktemp("aot") / "report.json"
    run = compile_all("--target", "sm_90", "gfx942", "--ways", "99", "--json", str(file), modules=(PLANTED,))
    return run, json.loads(file.read_text())["rows"]


def rows_of(rows: list[dict[str, Any]], case: str) -> dict[str, dict[str, Any]]:
    """Rows of one planted case by target."""
    return {row["target"]: row for row in rows if row["case"] == f"aot_planted.{case}"}


def test_every_kernel_compiles_for_hopper() -> None:
    run = compile_all("--target", "sm_90", "--ways", "0", "--jobs", "2")
    assert run.returncode == 0, run.stdout + run.stderr
    assert ", 0 problems" in run.stdout


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", TARGETS)
def test_every_case_compiles_for_every_chip(target: str) -> None:
    run = compile_all("--target", target, "--ways", "99")
    assert run.returncode == 0, run.stdout + run.stderr


def test_planted_faults_fail_the_command(planted: tuple[Any, Any]) -> None:
    run, rows = planted
    assert run.returncode == 1, run.stderr
    problems = run.stdout.rpartition("problems\n")[2].splitlines()
    assert len(problems) == sum(len(row["problems"]) for row in rows)
    assert not [line for line in problems if line.startswith("aot_planted.scale ")]
    for name in ("spills", "shared", "missing", "crash"):
        assert any(line.startswith(f"aot_planted.{name} sm_90: ") for line in problems), run.stdout


def test_a_valid_case_is_measured(planted: tuple[Any, Any]) -> None:
    rows = rows_of(planted[1], "scale")
    assert set(rows) == {"sm_90", "gfx942"}
    for row in rows.values():
        assert row["problems"] == []
        assert row["registers"] > 0
        assert row["spills"] == 0
        assert row["kernel"] == "scale_kernel"
    assert (rows["sm_90"]["threads"], rows["gfx942"]["threads"]) == (4 * 32, 4 * 64)


def test_spills_are_detected(planted: tuple[Any, Any]) -> None:
    for row in rows_of(planted[1], "spills").values():
        assert row["spills"] > 0
        assert any(text.startswith("spills ") for text in row["problems"])


def test_too_much_shared_memory_is_detected(planted: tuple[Any, Any]) -> None:
    rows = rows_of(planted[1], "shared")
    assert rows["sm_90"]["shared"] > 227 * KIB
    assert "shared memory" in rows["sm_90"]["problems"][0]
    assert "232448 each at most" in rows["sm_90"]["problems"][0]


def test_a_store_before_earlier_launches_have_ended_is_detected(planted: tuple[Any, Any]) -> None:
    rows = rows_of(planted[1], "hasty")
    assert rows["sm_90"]["problems"] == ["stores, or releases the next launch, before await_only()"]
    assert rows["gfx942"]["problems"] == []  # launches one after the other


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("missing", "arguments lack a type: out"),
        ("unknown", "name no argument: y"),
        ("both", "in the signature and in constexprs: n"),
        ("constexpr_typed", "constexpr arguments stand in the signature: BLOCK"),
        ("divisible", "divisible names no integer: FACTOR"),
        ("option", "refused by"),
        ("does_not_compile", "no_such_name"),
        ("crash", "the compiler died (exit code 7): planted crash"),
    ],
)
def test_faults_are_named(planted: tuple[Any, Any], case: str, words: str) -> None:
    rows = rows_of(planted[1], case)
    assert set(rows) == {"sm_90", "gfx942"}
    assert all(words in row["problems"][0] for row in rows.values())


def test_options_that_only_one_backend_takes_are_refused_by_the_other(planted: tuple[Any, Any]) -> None:
    rows = rows_of(planted[1], "refused")
    assert "refused by cuda: matrix_instr_nonkdim" in rows["sm_90"]["problems"][0]
    assert rows["gfx942"]["problems"] == []


def test_stores_are_released_before_a_counter_is_raised(tmp_path: Path) -> None:
    """AMD's barrier waits for no store: without the wait, the last program would add sums still under way."""
    script = """
import triton
from verify_kernels.gpu.aot.jobs import TARGETS, kernel_source, load_cases
for module in ("linear", "linear_int4"):
    cases = load_cases(f"verify_kernels.gpu.{module}")
    case = next(case for case in cases if case.constexprs.get("SPLIT_K") == 2 and "gfx942" in case.targets)
    compiled = triton.compile(kernel_source(case), target=TARGETS["gfx942"].gpu, options=dict(case.options))
    print(compiled.asm["amdgcn"], "<next kernel>")
"""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    codes = done.stdout.split("<next kernel>")[:-1]
    assert len(codes) == 2
    for code in codes:
        before = code[: code.index("global_atomic_add")].splitlines()
        kinds = [
            kind for line in before for kind in ("_store_", "vmcnt(0)", "s_barrier", "buffer_wbl2") if kind in line
        ]
        stored = len(kinds) - 1 - kinds[::-1].index("_store_")
        wait, barrier = kinds.index("vmcnt(0)", stored), kinds.index("s_barrier", stored)
        assert stored < wait < barrier < kinds.index("buffer_wbl2", stored)


def test_compiler_output_is_reported(planted: tuple[Any, Any]) -> None:
    (problem,) = rows_of(planted[1], "not_lowered")["sm_90"]["problems"]
    assert "error: 'llvm.fadd'" in problem or "get_fp8e4nv" in problem  # triton 3.9, 3.6


def test_number_formats_that_a_chip_lacks_are_skipped(planted: tuple[Any, Any]) -> None:
    assert set(rows_of(planted[1], "fp8")) == {"sm_90"}
    assert rows_of(planted[1], "fp8_constant") == {}


def test_the_interpreter_is_rejected(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert main(["--target", "sm_90"], (PLANTED,)) == 2
    assert "unset it" in capsys.readouterr().err


def test_nothing_to_do_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert main(["--only", "no such case"], (PLANTED,)) == 2
    assert "no such case" in capsys.readouterr().err


def test_missing_modules_are_errors() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_kernels"):
        plan_jobs(["verify_kernels.gpu.no_such_kernels"], [TARGETS["sm_90"]], (), None)


def test_cases_need_unique_names(monkeypatch: pytest.MonkeyPatch) -> None:
    case = aot_planted.compile_cases()[0]
    monkeypatch.setattr(aot_planted, "compile_cases", lambda: [case, case])
    with pytest.raises(ValueError, match="names scale twice"):
        load_cases(PLANTED)
    monkeypatch.setattr(aot_planted, "compile_cases", list)
    with pytest.raises(ValueError, match="empty"):
        load_cases(PLANTED)


def test_jobs_are_selected_by_name_target_and_kernel() -> None:
    both = [TARGETS["sm_80"], TARGETS["gfx942"]]
    assert [job.case for job in plan_jobs([PLANTED], both, ["aot_planted.spill"], None)] == ["spills", "spills"]
    once = plan_jobs([PLANTED], both, (), 0)
    assert [(job.kernel, job.target) for job in once] == [
        (kernel, target)
        for target in ("sm_80", "gfx942")
        for kernel in ("scale_kernel", "hoard_kernel", "matmul_kernel", "hasty_kernel", "mistyped_kernel")
        if (kernel, target) != ("matmul_kernel", "gfx942")
    ]


@pytest.mark.parametrize(("target", "ways"), [("sm_90", 3), ("sm_100", 2)])
def test_any_two_or_three_parameters_meet_as_in_the_full_list(target: str, ways: int) -> None:
    """So a fault that so many values cause together is met in one of the cases that are compiled."""
    modules = [f"verify_kernels.gpu.{name}" for name in ("linear", "norm", "quantize")]
    found = {}
    for every in (None, 99):
        jobs = plan_jobs(modules, [TARGETS[target]], (), every)
        wanted = {(job.module, job.case) for job in jobs}
        found[every] = [case for module in modules for case in load_cases(module) if (module, case.name) in wanted]
    assert len(found[None]) < 0.6 * len(found[99])
    met = {
        every: {at for case in cases for at in combinations(_parameters(case), ways)} for every, cases in found.items()
    }
    assert met[None] == met[99]


def _parameters(case: CompileCase) -> list[tuple[str, str]]:
    values = {**case.signature, **case.constexprs, **case.options, **{f"{name} % 16": 0 for name in case.divisible}}
    return sorted([("kernel", case.kernel.__name__), *((name, repr(value)) for name, value in values.items())])


def test_alignment_is_that_of_a_launch() -> None:
    """Triton looks at the address of a tensor unless the kernel forbids it; integers are as the case says."""
    script = """
from verify_kernels.gpu.aot.jobs import kernel_source, load_cases
for kernel in ("scan", "shorten"):
    cases = load_cases("verify_kernels.gpu.sampling")
    source = kernel_source(next(case for case in cases if case.name.startswith(f"sampling {kernel} filtered")))
    print(sorted(source.fn.arg_names[index] for (index,) in source.attrs))
"""
    done = run_uninterpreted("-c", script)
    assert done.stdout.splitlines() == [
        "['logits', 'places', 'row_stride', 'vocab']",
        "['places', 'spare']",
    ], done.stderr


def test_equal_cases_are_compiled_once_and_large_ways_keep_all_others() -> None:
    case = aot_planted.compile_cases()[0]
    forms = [replace(case, constexprs={"FACTOR": i}) for i in (1, 2, 2, True)] + [replace(case, divisible=("n",))]
    cases = {Job("m", str(i), "k", "sm_90"): form for i, form in enumerate(forms)}
    assert [job.case for job in covering(cases, 99)] == ["0", "2", "3", "4"]
    assert [job.case for job in covering(cases, 0)] == ["4"]


@pytest.mark.parametrize(("name", "limit"), [("sm_80", 163), ("sm_90", 227), ("sm_100", 227), ("gfx942", 64)])
def test_limits_are_exact(name: str, limit: int) -> None:
    target = TARGETS[name]
    file = 1024 * (128 if name == "gfx942" else 64)  # registers of a full block
    assert target.problems(replace(SOUND, shared=limit * KIB, threads=1024, registers=file // 1024)) == []
    assert "shared memory" in target.problems(replace(SOUND, shared=limit * KIB + 1))[0]
    assert "register file" in target.problems(replace(SOUND, threads=1024, registers=file // 1024 + 1))[0]
    assert "threads" in target.problems(replace(SOUND, threads=1056, registers=8))[0]
    assert "spills 1 " in target.problems(replace(SOUND, spills=1))[0]
    assert "scratch" in target.problems(replace(SOUND, scratch=8))[0]
    assert "tensor memory" in target.problems(replace(SOUND, tensor_memory=513))[0]


@pytest.mark.parametrize(("name", "total", "own"), [("sm_80", 164, 1), ("sm_90", 228, 1), ("gfx942", 64, 0)])
def test_blocks_that_share_a_multiprocessor_fit_together(name: str, total: int, own: int) -> None:
    target, half = TARGETS[name], total * KIB // 2 - own * KIB
    assert target.problems(replace(SOUND, shared=half), 2) == []
    assert "shared memory 2 x " in target.problems(replace(SOUND, shared=half + 1), 2)[0]
    assert target.problems(replace(SOUND, shared=half + 1)) == []
    most = 256 if name != "gfx942" else 504
    assert target.problems(replace(SOUND, threads=128 if own else 256, registers=most), 2 if own else 1) == []
    assert "2 x 264 registers" in target.problems(replace(SOUND, threads=256, registers=264), 2)[0]


def test_attention_tiles_are_limited_by_what_is_resident() -> None:
    cases = load_cases("verify_kernels.gpu.tree_attention")
    found = {case.resident for case in cases if case.name.startswith("attend sm_90")}
    assert found == {1, 2}


def test_an_unreadable_binary_is_an_error() -> None:
    with pytest.raises(ValueError, match="reports no registers"):
        read_usage(SimpleNamespace(metadata=None, asm={"amdgcn": ".vgpr_count: 12\n"}))


def test_every_launcher_module_is_listed() -> None:
    folder = Path(__file__).parents[3] / "verify_kernels" / "gpu"
    holders = [path for path in folder.glob("*.py") if "def compile_cases(" in path.read_text(encoding="utf-8")]
    assert sorted(KERNEL_MODULES) == sorted(f"verify_kernels.gpu.{path.stem}" for path in holders)
