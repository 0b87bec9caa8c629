"""Compiles kernels in worker processes: a compiler that crashes costs one case."""

from __future__ import annotations

import multiprocessing
import os
import queue
import re
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from typing import IO

from verify_kernels.gpu.aot.jobs import Job, Row, compile_job


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
