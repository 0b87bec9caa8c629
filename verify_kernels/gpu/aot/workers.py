"""Worker processes that compile: a compiler that crashes takes one case down, not the report."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait

from verify_kernels.gpu.aot.job import Job
from verify_kernels.gpu.aot.row import Row
from verify_kernels.gpu.aot.worker import Worker


class Workers:
    """Up to ``count`` processes, each with one job at a time, a fresh one wherever one has died."""

    def __init__(self, count: int) -> None:
        self._context = multiprocessing.get_context("spawn")  # a fork would share the parent's compiler state
        self._count = count

    def run(self, jobs: Sequence[Job], on_row: Callable[[Row], None]) -> list[Row]:
        """Compile ``jobs``; ``on_row`` hears of each as it is done. Rows come in the jobs' order."""
        waiting = list(reversed(range(len(jobs))))
        rows: dict[int, Row] = {}
        busy: dict[Worker, int] = {}

        def employ(worker: Worker) -> None:
            busy[worker] = waiting.pop()
            worker.give(jobs[busy[worker]])

        for _ in range(min(self._count, len(jobs))):
            employ(Worker(self._context))
        while busy:
            ready = wait([worker.pipe for worker in busy])
            for worker in [worker for worker in busy if worker.pipe in ready]:
                index = busy.pop(worker)
                row = worker.take()
                rows[index] = row or Row(jobs[index], None, (worker.last_words(),), 0.0)
                on_row(rows[index])
                if waiting:
                    employ(worker if row else Worker(self._context))
                else:
                    worker.end()
        return [rows[index] for index in range(len(jobs))]
