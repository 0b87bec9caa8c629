"""Compiles every kernel for every chip without a GPU and reports problems."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import triton
from triton import knobs

from specdec.control_groups import usable_cores
from verify_kernels.gpu.aot.jobs import KERNEL_MODULES, TARGETS, Row, plan_jobs
from verify_kernels.gpu.aot.workers import compile_all

_LINE = 160  # characters of a problem that a report line shows


def table(rows: Sequence[Row]) -> str:
    """Rows as text columns, the case first."""
    width = max(len(row.job.label) for row in rows)
    lines = [f"{'case':{width}}  target threads    regs  spills  shared       s"]
    for row in rows:
        usage = row.usage
        numbers = ("-",) * 4 if usage is None else (usage.threads, usage.registers, usage.spills, usage.shared)
        cells = "".join(f"{number:>8}" for number in numbers)
        lines.append(f"{row.job.label:{width}}  {row.job.target:6}{cells}{row.seconds:8.1f}")
    return "\n".join(lines)


def _brief(text: str) -> str:
    """First and last line of the error: its type and the compiler's message."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    brief = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
    return brief if len(brief) <= _LINE else brief[:_LINE] + "..."


def main(arguments: Sequence[str] | None = None, modules: Sequence[str] = KERNEL_MODULES) -> int:
    """Compile the cases of ``modules`` as the command line asks. Returns the exit code: 0 all well, 1 a case does not
    compile or breaks a limit, 2 nothing could be done."""
    options = _parser().parse_args(arguments)
    if knobs.runtime.interpret:
        print("TRITON_INTERPRET is set: interpreted kernels cannot be compiled; unset it", file=sys.stderr)
        return 2
    targets = [TARGETS[name] for name in options.target or TARGETS]
    jobs = plan_jobs(modules, targets, options.only, options.ways)
    if not jobs:
        print(f"no case matches --only {' '.join(options.only)} on {options.target or 'any target'}", file=sys.stderr)
        return 2
    done: list[Row] = []

    def on_row(row: Row) -> None:
        done.append(row)
        verdict = "PROBLEM" if row.problems else "ok"
        print(f"{len(done)}/{len(jobs)} {row.job.label} {row.job.target} {verdict}", file=sys.stderr, flush=True)

    rows = compile_all(jobs, options.jobs, on_row)
    problems = [f"{row.job.label} {row.job.target}: {_brief(text)}" for row in rows for text in row.problems]
    print(table(rows))
    if options.json:
        data = {"triton": triton.__version__, "rows": [row.as_json() for row in rows]}
        options.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(f"\n{len(rows)} cases, {len(problems)} problems", *problems, sep="\n")
    return 1 if problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m verify_kernels.gpu.aot", description=__doc__)
    parser.add_argument("--target", nargs="+", choices=sorted(TARGETS), help="chips to compile for (default: all)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="cases whose name holds NAME")
    ways = "every combination of values of N parameters; 0: one case a kernel, 99: all (default: 3 on sm_90, else 2)"
    parser.add_argument("--ways", type=int, metavar="N", help=ways)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there, too")
    parser.add_argument("--jobs", type=_positive, default=usable_cores(), help="processes (default: one per core)")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
