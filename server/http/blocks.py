"""An answer as a sequence of blocks, text or tool calls, for dialects that stream it block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from server.http.tool_calls import CallArguments, CallBegin, CallEnd, Part, ToolCall
from server.http.tool_use import ToolUse


class Step(Enum):
    """An event of a block."""

    OPEN = 0
    ADD = 1
    CLOSE = 2


@dataclass(slots=True)
class Block:
    """A block of an answer."""

    index: int
    call: CallBegin | ToolCall | None = None  # None: text
    text: str = ""  # so far; the arguments of a call, as JSON


Steps = Iterator[tuple[Step, Block, str]]


class Blocks:
    """Turns pieces of text into events of blocks: (step, block, added text). Read them before the next piece.

    One block is open at a time, the last of ``found``.
    """

    def __init__(self, tools: ToolUse | None, whole: bool = False) -> None:
        """tools: whose calls are searched for. whole: the arguments of a call come in one piece, not as written."""
        self._parser = None if tools is None else tools.whole_parser() if whole else tools.parser()
        self._is_open = False
        self.found: list[Block] = []

    @staticmethod
    def of(text: str, tools: ToolUse | None) -> Blocks:
        """The blocks of a complete text."""
        blocks = Blocks(tools, whole=True)
        for _ in (*blocks.push(text), *blocks.end()):
            pass
        return blocks

    def push(self, text: str) -> Steps:
        """Add a piece of text."""
        yield from self._take([text] if self._parser is None else self._parser.push(text))

    def end(self) -> Steps:
        """End the text."""
        if self._parser is not None:
            yield from self._take(self._parser.flush())
        yield from self._close()

    @property
    def called(self) -> bool:
        """Whether there are complete calls."""
        return self._parser is not None and self._parser.whole_calls > 0

    def _take(self, parts: Sequence[Part | ToolCall]) -> Steps:
        for part in parts:
            if isinstance(part, CallBegin | ToolCall):
                yield from self._open(part)
            if isinstance(part, CallArguments):
                yield self._add(part.text)
            elif isinstance(part, ToolCall):
                yield self._add(part.arguments)
            if isinstance(part, CallEnd | ToolCall):
                yield from self._close()
            elif isinstance(part, str) and part:
                if not (self._is_open and self.found[-1].call is None):
                    yield from self._open(None)
                yield self._add(part)

    def _open(self, call: CallBegin | ToolCall | None) -> Steps:
        yield from self._close()
        self.found.append(Block(len(self.found), call))
        self._is_open = True
        yield Step.OPEN, self.found[-1], ""

    def _add(self, text: str) -> tuple[Step, Block, str]:
        self.found[-1].text += text
        return Step.ADD, self.found[-1], text

    def _close(self) -> Steps:
        if self._is_open:
            self._is_open = False
            yield Step.CLOSE, self.found[-1], ""
