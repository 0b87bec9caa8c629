"""Compiles one kernel case for one chip."""

from __future__ import annotations

import time

import triton

from verify_kernels.gpu.aot.cases import load_cases
from verify_kernels.gpu.aot.job import Job
from verify_kernels.gpu.aot.read_usage import read_usage
from verify_kernels.gpu.aot.row import Row
from verify_kernels.gpu.aot.source import kernel_source
from verify_kernels.gpu.aot.target import TARGETS


def compile_job(job: Job) -> Row:
    """The report's line on ``job``; whatever goes wrong is in it as a problem."""
    target = TARGETS[job.target]
    start = time.monotonic()
    try:
        case = next(case for case in load_cases(job.module) if case.name == job.case)
        compiled = triton.compile(kernel_source(case), target=target.gpu, options=dict(case.options))
        usage = read_usage(compiled)
    except Exception as error:  # triton's compiler raises what it likes
        return Row(job, None, (f"does not compile: {type(error).__name__}: {error}",), time.monotonic() - start)
    return Row(job, usage, tuple(target.problems(usage, case.resident)), time.monotonic() - start)
