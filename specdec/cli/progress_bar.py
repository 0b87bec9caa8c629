"""Progress bars on a terminal's standard error."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class ProgressBar:
    """A `Progress` listener that draws one bar per label; draws nothing when standard error is no terminal.

    Use as a context manager: ``with ProgressBar() as progress: load_model(..., progress=progress)``.
    """

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
        self._bars = Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> ProgressBar:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def __call__(self, label: str, done: int, total: int) -> None:
        """Move the bar of ``label`` to ``done`` of ``total``."""
        if label not in self._tasks:
            self._tasks[label] = self._bars.add_task(label, total=total or None)
        self._bars.update(self._tasks[label], completed=done, total=total or None)
