"""Threads that convert a model's weights."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch


@contextmanager
def conversion_pool() -> Iterator[ThreadPoolExecutor]:
    """One thread per core, while torch takes one for each operation: nested teams would fight over the cores."""
    intra_op = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            yield pool
    finally:
        torch.set_num_threads(intra_op)
