"""A line that shows where a running experiment is."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.experiment.board import Board

_PLAIN_EVERY_S = 30.0


class AbProgress:
    """On a terminal one line that changes, else a line of its own now and then; nothing where ``quiet``.

    It is drawn by whoever runs the experiment, between requests: a thread of its own would disturb what is measured.
    """

    def __init__(self, quiet: bool) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True, quiet=quiet)
        self._live: Live | None = None
        if self._console.is_terminal and not quiet:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._begun_s = self._said_s = time.monotonic()

    def watch(self, board: Board) -> None:
        """The run went on."""
        from rich.text import Text

        now = time.monotonic()
        text = Text(progress_line(board, now - self._begun_s), style="dim")
        if self._live is not None:
            self._live.update(text, refresh=True)
        elif now - self._said_s >= _PLAIN_EVERY_S:
            self._said_s = now
            self._console.print(text, soft_wrap=True)

    def __enter__(self) -> AbProgress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()


def progress_line(board: Board, passed_s: float) -> str:
    """Counts so far, the medians of both arms and their ratio."""
    of = "" if board.planned is None else f"/{board.planned}"
    done = f"pairs {len(board.done)}{of}" if board.done or board.planned else f"requests {sum(board.asked)}"
    words = [f"{passed_s:6.0f} s", done]
    a, b = medians = board.medians()
    for name, value in zip(board.names, medians, strict=True):
        words.append(f"{name} {board.metric} " + ("-" if value is None else f"{value:.4g}"))
    if a and b is not None:
        words.append(f"ratio {b / a:.3f}")
    words.append(f"different tokens {len(board.mismatched)}")
    words.append(f"failed {board.failed[0]}+{board.failed[1]}")
    return "  ".join(words)
