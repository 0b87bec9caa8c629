"""The worker pool under many small jobs: each unit once, none of another job's."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from tests.kernels.natives import native_backend, need_compiler
from tools.markdown import REPOSITORY
from verify_kernels.backend import LinearSpec
from verify_kernels.packed_weights import pack_linear


def test_many_small_jobs_of_changing_size() -> None:
    """Jobs follow each other immediately and differ in size and function, so that a late worker gets a new job."""
    backend = native_backend(4)
    backend.reserve(64, 256, 64)
    generator = torch.Generator().manual_seed(0)
    cases = []
    for n in (64, 640, 128, 1920, 70):
        weight = pack_linear(torch.randn(n, 64, generator=generator), None, "int8")
        src, dst = torch.randn(64, 64, generator=generator), torch.zeros(64, n)
        op = backend.bind(LinearSpec(weight, src, dst))
        op(64)
        cases.append((op, dst, dst.clone()))
    for turn in range(4000):
        op, dst, expected = cases[turn % len(cases)]
        rows = 1 + turn % 7
        dst[:rows] = -1
        op(rows)
        assert torch.equal(dst[:rows], expected[:rows])


NO_MORE_THREADS = """
import resource
from pathlib import Path
import torch
from tests.kernels.natives import CACHE
from verify_kernels.cpu.library import load_library
from verify_kernels.cpu.native_backend import NativeSampling
from verify_kernels.sampling import RowSampling, SamplingPolicy
torch.set_num_threads(1)
library, logits = load_library(CACHE), torch.randn(40, 3000)
rows = [RowSampling(SamplingPolicy(0), 0)] * 40
expected = NativeSampling(library, 1).sample(logits, rows)
_, most = resource.getrlimit(resource.RLIMIT_STACK)
resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, most))  # of threads that start from now on
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20),) * 2)  # less than a thread's stack
for _ in range(3):
    assert (NativeSampling(library, 8).sample(logits, rows) == expected).all()
"""


def test_threads_that_the_system_refuses_are_done_without() -> None:
    need_compiler()
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", NO_MORE_THREADS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "specdec: the system allows 1 of 8 threads: " in done.stderr
