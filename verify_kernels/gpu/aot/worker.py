"""One process that compiles, one job at a time."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from typing import IO

from verify_kernels.gpu.aot.compile_job import compile_job
from verify_kernels.gpu.aot.job import Job
from verify_kernels.gpu.aot.row import Row


class Worker:
    """A process, and the file that takes what its compiler prints. ``pipe`` is ready when its job is done or it has
    died."""

    def __init__(self, context: SpawnContext) -> None:
        self._log: IO[bytes] = tempfile.NamedTemporaryFile()  # noqa: SIM115 - lives as long as the worker
        self.pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, self._log.name), daemon=True)
        self._process.start()
        other.close()

    def give(self, job: Job) -> None:
        """Start on ``job``."""
        with contextlib.suppress(OSError):  # it died between jobs; `take` will find out
            self.pipe.send(job)

    def take(self) -> Row | None:
        """The finished row; None when the process has died over it."""
        try:
            row: Row = self.pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            return None
        printed = self._printed()
        if row.usage is None and (said := re.search(r"error: .*", printed)):  # what triton's exceptions leave out
            row = replace(row, problems=tuple(f"{problem}\n{said[0]}" for problem in row.problems))
        return row

    def last_words(self) -> str:
        """Of a process that has died: how, and the last line it printed."""
        lines = self._printed().splitlines() or ["it printed nothing"]
        return f"the compiler died (exit code {self._process.exitcode}): {lines[-1].strip()}"

    def end(self) -> None:
        """Let the process go."""
        self.pipe.close()
        self._process.join()
        self._log.close()

    def _printed(self) -> str:
        """Since it was last asked."""
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
