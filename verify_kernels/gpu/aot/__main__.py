"""Compiles every kernel for every chip without a GPU, in worker processes, and reports problems."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from pathlib import Path
from typing import IO, Any

import triton
from triton import knobs

from verify_kernels.gpu.aot.jobs import KERNEL_MODULES, TARGETS, Job, Row, compile_job, plan_jobs


class Worker:
    """A process that compiles jobs, and the file that its compiler prints to."""

    def __init__(self, context: SpawnContext) -> None:
        self._log: IO[bytes] = tempfile.NamedTemporaryFile()  # noqa: SIM115 - lives as long as the worker
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, self._log.name), daemon=True)
        self._process.start()
        other.close()

    @property
    def alive(self) -> bool:
        """Whether the process can take a job."""
        return self._process.is_alive()

    def compile(self, job: Job) -> Row:
        """The report on ``job``; if the process dies, its problem is the last line that it printed."""
        try:
            self._pipe.send(job)
            row: Row = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            lines = self._printed().splitlines() or ["it printed nothing"]
            problem = f"the compiler died (exit code {self._process.exitcode}): {lines[-1].strip()}"
            return Row(job, None, (problem,), 0.0)
        printed = self._printed()
        if row.usage is None and (found := re.search(r"error: .*", printed)):  # missing from triton's exceptions
            row = replace(row, problems=tuple(f"{problem}\n{found[0]}" for problem in row.problems))
        return row

    def end(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join()
        self._log.close()

    def _printed(self) -> str:
        """The text printed since the last call."""
        return self._log.read().decode(errors="replace").strip()


def _serve(pipe: Connection, log: str) -> None:
    sink = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        pipe.send(compile_job(job))


def compile_all(jobs: Sequence[Job], processes: int, on_row: Callable[[Row], None]) -> list[Row]:
    """The reports on ``jobs``, in their order, by so many processes; a dead one is replaced.

    ``on_row`` receives each report when it is done, in one of several threads.
    """
    context = multiprocessing.get_context("spawn")  # a fork would share the parent's compiler state
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    for _ in range(min(processes, len(jobs))):
        idle.put(Worker(context))

    def compile_one(job: Job) -> Row:
        worker = idle.get()
        row = worker.compile(job)
        idle.put(worker if worker.alive else Worker(context))
        on_row(row)
        return row

    with ThreadPoolExecutor(processes) as pool:
        rows = list(pool.map(compile_one, jobs))
    while not idle.empty():
        idle.get().end()
    return rows


_HEAD = ("case", "target", "threads", "regs", "spills", "shared", "s")
_LINE = 160  # characters of a problem that a report line shows


def table(rows: Sequence[Row]) -> str:
    """Rows as text columns, the case first."""
    lines = [_HEAD, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEAD))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def problem_lines(rows: Sequence[Row]) -> list[str]:
    """One line for each problem: which case, which chip, what."""
    return [f"{row.job.label} {row.job.target}: {_brief(text)}" for row in rows for text in row.problems]


def as_json(rows: Sequence[Row]) -> str:
    """Everything, problems in full."""
    data: dict[str, Any] = {"triton": triton.__version__, "rows": [row.as_json() for row in rows]}
    return json.dumps(data, indent=1) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    usage = row.usage
    numbers = ("-",) * 4 if usage is None else (usage.threads, usage.registers, usage.spills, usage.shared)
    return (row.job.label, row.job.target, *map(str, numbers), f"{row.seconds:.1f}")


def _brief(text: str) -> str:
    """First and last line: what kind of error it is, and what the compiler says it is about."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    brief = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
    return brief if len(brief) <= _LINE else brief[:_LINE] + "..."


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

    rows = compile_all(jobs, options.jobs, on_row)
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


if __name__ == "__main__":  # worker processes import this module under another name
    sys.exit(main())
