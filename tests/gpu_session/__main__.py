"""Everything that needs a GPU, in one command: checks first, then benchmarks.

Runs from the checkout with torch, triton, numpy and transformers; what else a task imports is taken from wheels, or
the task is skipped. The report is written after every task. A run that is cut off goes on where it stopped.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.workloads import CONCURRENT_NAMES
from tests.gpu_session.session import RESULT, Session, Task, python
from tests.gpu_session.wheels import COMMANDS, ENGINE, ROOT, TESTS, unpack

KERNELS = (
    "norm", "act", "quantize", "write_kv", "accept", "linear", "linear_fp8", "linear_int4",
    "attention", "sampling",
)  # fmt: skip
TWINS, MODELS, CLI = "tests.gpu_session.twins", "tests.gpu_session.models", "specdec.cli.main"
BENCHES = "bench.kernels.kernel_bench"
SMALL, MIDDLE, LARGE = "random:qwen2.5-coder-0.5b", "random:qwen2.5-coder-1.5b", "random:llama-3.1-8b"
SANITIZER_CASES = 2  # smallest shapes of a kernel: a sanitizer slows it by a hundred times
TEST_FOLDERS = ("tests/kernels/gpu", "tests/models/device", "tests/engine/test_device_engine.py")
CUDA_PROGRAMS = "/usr/local/cuda/bin"


def plan(on_gpu: bool, pairs: int) -> list[Task]:
    """All tasks in order. Without a GPU: those that the interpreter can run, on its smallest shapes and models."""
    if not on_gpu:
        return _interpreted(pairs)
    tasks = [
        Task("self-test", f"self-test {target} {dtype}", python(MODELS, "self-test", target, "--dtype", dtype,
             "--prompt", "1300"), needs=ENGINE)
        for target, dtype in (("random:tiny", "bf16"), (SMALL, "bf16"), (SMALL, "fp16"), (SMALL, "fp8"),
                              (MIDDLE, "bf16"))
    ]  # fmt: skip
    tasks += [Task("twins", f"twins {name}", python(TWINS, name, "--json", RESULT)) for name in KERNELS]
    tasks += [_sanitized(tool, name) for tool in ("memcheck", "racecheck") for name in KERNELS]
    tasks += [
        Task("poison", f"poison {target} {dtype}", python(MODELS, "poison", target, "--dtype", dtype), needs=ENGINE)
        for target, dtype in ((SMALL, "bf16"), (SMALL, "fp8"), (MIDDLE, "bf16"))
    ]
    tasks += [
        Task("verify", f"verify {target} {dtype}", python(MODELS, "verify", target, "--dtype", dtype, "--pairs",
             str(pairs)), needs=ENGINE)
        for target, dtype in ((SMALL, "bf16"), (MIDDLE, "bf16"), (SMALL, "fp8"))
    ]  # fmt: skip
    benches = [(part, ["--only", part]) for part in ("attention", "rivals")]
    benches += [("steps 1.5B", ["--only", "steps", "--target", MIDDLE]), ("steps 8B", ["--only", "steps"])]
    tasks += [
        Task("benches", f"bench {name}", python(BENCHES, *words, "--json", RESULT), needs=ENGINE, alone=True)
        for name, words in benches
    ]
    engine = ["--device", "cuda", "--drafter", "oracle:0.8", "--drafter", "suffix", "--prompts", "3"]
    workloads = [word for name in ("edit", "chat", *CONCURRENT_NAMES) for word in ("--workload", name)]
    tasks += [
        Task("engine", f"bench engine {target}", python(CLI, "bench", "engine", "--target", target,
             *engine, *workloads, "--json", RESULT), needs=COMMANDS, alone=True)
        for target in (MIDDLE, LARGE)
    ]  # fmt: skip
    return tasks + _tests()


def _interpreted(pairs: int) -> list[Task]:
    tiny = ("random:tiny", "--dtype", "fp16", "--prompt", "12")
    tasks = [Task("self-test", "self-test tiny", python(MODELS, "self-test", *tiny), needs=ENGINE)]
    tasks += [Task("twins", f"twins {name}", python(TWINS, name, "--most", "1", "--json", RESULT)) for name in KERNELS]
    tasks += [_sanitized("memcheck", "norm")]
    tasks += [Task("poison", "poison tiny", python(MODELS, "poison", *tiny), needs=ENGINE)]
    # An engine of interpreted kernels takes seconds a step: here the commands run on a CPU's.
    tiny_engine = ("--target", "random:tiny", "--device", "cpu", "--drafter", "oracle:0.8")
    verify = python(CLI, "verify", *tiny_engine, "--pairs", str(pairs), "--max-tokens", "4", "--json")
    bench = python(CLI, "bench", "engine", *tiny_engine, "--workload", "edit", "--prompts", "1", "--max-tokens", "8")
    return [
        *tasks,
        Task("verify", "verify tiny", verify, needs=COMMANDS),
        Task("engine", "bench engine tiny", [*bench, "--json", RESULT], needs=COMMANDS, alone=True),
    ]


def _sanitized(tool: str, kernel: str) -> Task:
    program = "compute-sanitizer"
    twins = python(TWINS, kernel, "--most", str(SANITIZER_CASES), "--case-limit", "400", "--json", RESULT)
    # Without torch's own pools every tensor is an allocation, whose bounds the tool sees.
    command = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", program, "--tool", tool, "--error-exitcode", "1", *twins]
    return Task("sanitizer", f"{tool} {kernel}", command, program=program)


def _tests() -> list[Task]:
    files = [ROOT / folder for folder in TEST_FOLDERS]
    found = [test for file in files for test in (sorted(file.glob("test_*.py")) if file.is_dir() else [file])]
    return [
        Task("tests", str(test.relative_to(ROOT)), python("pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "gpu",
             str(test.relative_to(ROOT))), needs=TESTS)
        for test in found
    ]  # fmt: skip


def facts() -> dict[str, Any]:
    """The machine and its versions."""
    versions = {}
    for name in ("torch", "triton", "transformers", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU, kernels interpreted"
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {"device": device, "python": platform.python_version(), **versions, "last run": date}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if every task passed or was skipped, 1 if one failed or is still to be run."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_session", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), metavar="FOLDER",
                        help="folder of report.json, which a next run continues, and report.md")  # fmt: skip
    parser.add_argument("--minutes", type=float, help="stop after so many; the next run continues")
    parser.add_argument("--jobs", type=int, default=4, help="checks at a time; benchmarks run alone (default: 4)")
    stages = list(dict.fromkeys(task.stage for task in plan(torch.cuda.is_available(), 1)))
    parser.add_argument("--stage", nargs="+", choices=stages, help="only these stages (default: all)")
    parser.add_argument("--pairs", type=int, default=100, help="of verify")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".wheels", metavar="FOLDER",
                        help="packages that this Python may lack (default: .wheels)")  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="forget the report of earlier runs")
    options = parser.parse_args(arguments)
    if options.fresh:
        shutil.rmtree(options.out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as site:
        unpacked = unpack(options.wheels, Path(site))
        sys.path.insert(0, site)
        paths = [site, str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PATH": os.pathsep.join((os.environ.get("PATH", ""), CUDA_PROGRAMS)),
        }
        tasks = plan(torch.cuda.is_available(), options.pairs)
        session = Session(
            [task for task in tasks if not options.stage or task.stage in options.stage], options.out,
            jobs=options.jobs, budget_s=options.minutes and options.minutes * 60,
            facts=facts() | {"from wheels": ", ".join(unpacked) or "nothing"}, environment=environment,
            say=lambda line: print(line, flush=True),
        )  # fmt: skip
        signal.signal(signal.SIGTERM, lambda *_: session.stop())
        passed = session.run()
    print(f"report: {options.out / 'report.md'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
