"""Which modules hold kernels, and the compile cases they name."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from verify_kernels.gpu.aot.job import Job
from verify_kernels.gpu.aot.target import Target
from verify_kernels.gpu.compile_case import CompileCase

KERNEL_MODULES: tuple[str, ...] = (
    "verify_kernels.gpu.accept",
    "verify_kernels.gpu.act",
    "verify_kernels.gpu.attention_plan",
    "verify_kernels.gpu.embed",
    "verify_kernels.gpu.gather_rows",
    "verify_kernels.gpu.kv_ops",
    "verify_kernels.gpu.linear",
    "verify_kernels.gpu.linear_fp8",
    "verify_kernels.gpu.linear_int4",
    "verify_kernels.gpu.linear_permute",
    "verify_kernels.gpu.norm",
    "verify_kernels.gpu.quantize",
    "verify_kernels.gpu.sampling",
    "verify_kernels.gpu.tree_attention",
    "verify_kernels.gpu.tree_build",
)


def load_cases(module: str) -> list[CompileCase]:
    """What ``module``'s ``compile_cases()`` names; import errors surface as they are.

    Raises:
        ValueError: it names none, or two of one name.
    """
    cases: list[CompileCase] = importlib.import_module(module).compile_cases()
    names = [case.name for case in cases]
    twice = sorted({name for name in names if names.count(name) > 1})
    if not cases or twice:
        raise ValueError(f"{module}.compile_cases(): {'names ' + ', '.join(twice) + ' twice' if twice else 'empty'}")
    return cases


def plan_jobs(
    modules: Sequence[str], targets: Sequence[Target], only: Sequence[str], one_per_kernel: bool
) -> list[Job]:
    """Every case of ``modules`` on every one of ``targets`` that it is meant for and that has its number formats.

    only: keeps cases whose "module.case" holds one of these texts; empty keeps all.
    one_per_kernel: keeps the first case that a module has of each kernel, on each target.
    """
    named = [(module, case) for module in modules for case in load_cases(module)]
    jobs: list[Job] = []
    for target in targets:
        seen: set[tuple[str, int]] = set()
        for module, case in named:
            job = Job(module, case.name, case.kernel.__name__, target.name)
            wanted = not only or any(text in job.label for text in only)
            if wanted and target.runs(case) and not (one_per_kernel and (module, id(case.kernel)) in seen):
                seen.add((module, id(case.kernel)))
                jobs.append(job)
    return jobs
