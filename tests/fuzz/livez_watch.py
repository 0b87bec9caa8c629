"""How long `/livez` takes under load, measured by a separate process."""

from __future__ import annotations

import http.client
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from typing import Any

_EVERY_S = 0.02
_LIMIT_S = 30.0


@contextmanager
def livez_watch(port: int) -> Iterator[None]:
    """Poll every 20 ms inside; then print the time of the slowest percent."""
    spawn = multiprocessing.get_context("spawn")
    over, ours_and_its = spawn.Event(), spawn.Pipe(duplex=False)
    ours, its = ours_and_its
    process = spawn.Process(target=_watch, args=(port, over, its), daemon=True)
    process.start()
    try:
        yield
    finally:
        over.set()
        found = sorted(ours.recv())
        process.join()
    p50, p99 = (1000 * found[int(part * (len(found) - 1))] for part in (0.5, 0.99))
    print(f"/livez asked {len(found)} times: p50 {p50:.1f} ms, p99 {p99:.1f} ms, at most {1000 * found[-1]:.1f} ms")


def _watch(port: int, over: Event, report: Any) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_LIMIT_S)
    took = []
    while not took or not over.wait(_EVERY_S):
        began = time.perf_counter()
        connection.request("GET", "/livez")
        connection.getresponse().read()
        took.append(time.perf_counter() - began)
    report.send(took)
