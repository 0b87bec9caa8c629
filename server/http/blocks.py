"""An answer as a row of blocks, text or calls of tools, for dialects that stream it block by block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from server.http.tool_calls import ToolCall, ToolCallParser


class Step(Enum):
    """What happens to a block."""

    OPEN = 0
    ADD = 1
    CLOSE = 2


@dataclass(slots=True)
class Block:
    """Block ``index`` of an answer. ``text`` is what there is so far: of the arguments, as JSON, where it is a
    ``call``."""

    index: int
    call: ToolCall | None = None
    text: str = ""


Steps = Iterator[tuple[Step, Block, str]]


class Blocks:
    """Text comes in as pieces, and out as what that does to blocks: (step, block, the text that is added), to be read
    before the next piece. One block is open at a time, the last of ``found``. ``tools``: calls of tools are looked
    for."""

    def __init__(self, tools: bool) -> None:
        self._parser = ToolCallParser() if tools else None
        self._is_open = False
        self.found: list[Block] = []

    @staticmethod
    def of(text: str, tools: bool) -> Blocks:
        """Those of a whole text."""
        blocks = Blocks(tools)
        for _ in (*blocks.push(text), *blocks.end()):
            pass
        return blocks

    def push(self, text: str) -> Steps:
        """Take the next piece."""
        parts: list[str | ToolCall] = [text] if self._parser is None else self._parser.push(text)
        yield from self._take(parts)

    def end(self) -> Steps:
        """The text has ended."""
        if self._parser is not None:
            yield from self._take(self._parser.flush())
        yield from self._close()

    @property
    def called(self) -> bool:
        """Whether there are calls."""
        return any(block.call is not None for block in self.found)

    def _take(self, parts: list[str | ToolCall]) -> Steps:
        for part in parts:
            if isinstance(part, ToolCall):
                yield from self._open(part)
                yield self._add(part.arguments)
                yield from self._close()
            elif part:
                if not (self._is_open and self.found[-1].call is None):
                    yield from self._open(None)
                yield self._add(part)

    def _open(self, call: ToolCall | None) -> Steps:
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
