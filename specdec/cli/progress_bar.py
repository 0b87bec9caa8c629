"""Progress on standard error: bars, and a line that a measurement draws itself."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.text import Text

from specdec.cli.bench_output import progress_line

if TYPE_CHECKING:
    from specdec.config import EngineConfig
    from specdec.engine.engine import EngineParts
    from specdec.models.progress import Progress


@contextmanager
def progress_bars(console: Console | None = None) -> Iterator[Progress]:
    """A listener that draws one bar per label, on standard error by default; draws nothing when that is no terminal."""
    console = console or Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    tasks: dict[str, TaskID] = {}
    with Bars(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bars:

        def show(label: str, done: int, total: int) -> None:
            if label not in tasks:
                tasks[label] = bars.add_task(label, total=total or None)
            bars.update(tasks[label], completed=done, total=total or None)

        yield show


def load_parts(config: EngineConfig) -> EngineParts:
    """The parts of an engine, with bars while they are fetched and loaded. Raises as `build_parts`."""
    from specdec.engine.build import build_parts

    with progress_bars() as progress:
        return build_parts(config, progress)


class LiveLine:
    """One line that changes; on no terminal a new line every ``plain_every_s`` seconds, none without that number.

    Drawn from the caller's own loop, because a separate thread would disturb what is measured.
    """

    def __init__(self, *, quiet: bool = False, plain_every_s: float = math.inf) -> None:
        self._console = Console(stderr=True)
        self.note = progress_line(self._console)  # prints a line above
        self._plain_every_s = math.inf if quiet else plain_every_s
        self._begun_s = self._said_s = time.monotonic()
        self._live: Live | None = None
        if self._console.is_terminal and not quiet:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)

    @property
    def passed_s(self) -> float:
        """Seconds since the line was made."""
        return time.monotonic() - self._begun_s

    @property
    def shows(self) -> bool:
        """Whether `show` ever prints anything."""
        return self._live is not None or math.isfinite(self._plain_every_s)

    def show(self, line: str) -> None:
        """Replace the line."""
        text, now = Text(line, style="dim"), time.monotonic()
        if self._live is not None:
            self._live.update(text, refresh=True)
        elif now - self._said_s >= self._plain_every_s:
            self._said_s = now
            self._console.print(text, soft_wrap=True)

    def __enter__(self) -> LiveLine:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
