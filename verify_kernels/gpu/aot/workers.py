"""Compiles each case in a process of its own: a compiler that crashes costs one case."""

from __future__ import annotations

import multiprocessing
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection

from verify_kernels.gpu.aot.jobs import Job, Row, compile_job

# Its server has imported the compiler and used none of it, so that each process starts fast and shares no state.
_CONTEXT = multiprocessing.get_context("forkserver")


def compile_all(jobs: Sequence[Job], processes: int, on_row: Callable[[Row], None]) -> list[Row]:
    """The reports on ``jobs``, in their order, so many processes at a time.

    ``on_row`` receives each report when it is done, in one of several threads.
    """
    _CONTEXT.set_forkserver_preload([compile_job.__module__])

    def compile_one(job: Job) -> Row:
        row = _compile_apart(job)
        on_row(row)
        return row

    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(compile_one, jobs))


def _compile_apart(job: Job) -> Row:
    """The report on ``job``; if its process dies, its problem is the last line that it printed."""
    with tempfile.NamedTemporaryFile() as log:
        answer, reply = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_report, args=(job, reply, log.name), daemon=True)
        process.start()
        reply.close()
        try:
            row: Row | None = answer.recv()
        except EOFError:
            row = None
        process.join()
        printed = log.read().decode(errors="replace").strip()
    if row is None:
        lines = printed.splitlines() or ["it printed nothing"]
        problem = f"the compiler died (exit code {process.exitcode}): {lines[-1].strip()}"
        return Row(job, None, (problem,), 0.0)
    if row.usage is None and (found := re.search(r"error: .*", printed)):  # missing from triton's exceptions
        row = replace(row, problems=tuple(f"{problem}\n{found[0]}" for problem in row.problems))
    return row


def _report(job: Job, reply: Connection, log: str) -> None:
    sink = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    reply.send(compile_job(job))
