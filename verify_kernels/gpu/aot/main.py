"""The command line of ahead-of-time compilation."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from triton import knobs

from verify_kernels.gpu.aot.cases import KERNEL_MODULES, plan_jobs
from verify_kernels.gpu.aot.report import as_json, problem_lines, table
from verify_kernels.gpu.aot.row import Row
from verify_kernels.gpu.aot.target import TARGETS
from verify_kernels.gpu.aot.workers import Workers


def main(arguments: Sequence[str] | None = None, modules: Sequence[str] = KERNEL_MODULES) -> int:
    """Compile the cases of ``modules`` as the command line asks. Returns the exit code: 0 all well, 1 a case does not
    compile or breaks a limit, 2 nothing could be done."""
    options = _parser().parse_args(arguments)
    if knobs.runtime.interpret:
        print("TRITON_INTERPRET is set: interpreted kernels can not be compiled; unset it", file=sys.stderr)
        return 2
    targets = [TARGETS[name] for name in options.target or TARGETS]
    jobs = plan_jobs(modules, targets, options.only, options.one_per_kernel)
    if not jobs:
        print(f"no case matches --only {' '.join(options.only)} on {options.target or 'any target'}", file=sys.stderr)
        return 2
    done: list[Row] = []

    def on_row(row: Row) -> None:
        done.append(row)
        verdict = "PROBLEM" if row.problems else "ok"
        print(f"{len(done)}/{len(jobs)} {row.job.label} {row.job.target} {verdict}", file=sys.stderr, flush=True)

    rows = Workers(options.jobs).run(jobs, on_row)
    problems = problem_lines(rows)
    print(table(rows))
    if options.json:
        options.json.write_text(as_json(rows), encoding="utf-8")
    print(f"\n{len(rows)} cases, {len(problems)} problems", *problems, sep="\n")
    return 1 if problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m verify_kernels.gpu.aot", description=__doc__)
    parser.add_argument("--target", nargs="+", choices=sorted(TARGETS), help="chips to compile for (default: all)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="cases whose name holds NAME")
    parser.add_argument("--one-per-kernel", action="store_true", help="only the first case of each kernel")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there, too")
    parser.add_argument(
        "--jobs", type=_positive, default=len(os.sched_getaffinity(0)), help="processes (default: one per core)"
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
