"""Conversations whose tool calls and results are parts of their own, translated to and from those of chat templates."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from server.http.answer_parser import CallArguments, CallEnd, Part, Thought, ToolCall
from server.http.tool_use import AnswerForm
from server.json_body import Body


class Conversation:
    """Collects messages in the form of OpenAI's chat. Consecutive ones of a role are joined, because many templates
    require roles to alternate."""

    def __init__(self) -> None:
        self._turns: list[dict[str, Any]] = []  # messages whose content is a list of texts
        self._thoughts: list[str] = []  # of the assistant, which has said nothing since

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages so far."""
        return [{**turn, "content": "\n".join(turn["content"])} for turn in self._turns]

    def say(self, role: str, text: str) -> None:
        """Add text of ``role``."""
        if not self._turns or self._turns[-1]["role"] != role:
            self._turns.append({"role": role, "content": []})
        turn = self._turns[-1]
        if text:
            turn["content"].append(text)
        if role == "assistant" and self._thoughts:
            earlier = [turn["reasoning_content"]] if "reasoning_content" in turn else []
            turn["reasoning_content"] = "\n".join(earlier + self._thoughts)
        self._thoughts = []

    def think(self, text: str) -> None:
        """Add thoughts of the assistant, for templates that repeat them beside what it says or calls next."""
        if text:
            self._thoughts.append(text)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a tool call of the assistant; ``arguments`` is JSON."""
        self.say("assistant", "")
        called = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turns[-1].setdefault("tool_calls", []).append(called)

    def answer(self, call_id: str, text: str) -> None:
        """Add the result of a call."""
        self._turns.append({"role": "tool", "tool_call_id": call_id, "content": [text]})

    def take_beginning(self) -> str:
        """Remove the last message if it is the assistant's and calls no tool, and return it as the beginning of the
        answer. Empty: there is none."""
        if not self._turns or self._turns[-1]["role"] != "assistant" or "tool_calls" in self._turns[-1]:
            return ""
        return "\n".join(self._turns.pop()["content"])


def read_text(given: Body, name: str, kinds: Collection[str]) -> str:
    """Text, or the joined texts of a list of parts whose types are among ``kinds``."""
    value = given.raw(name)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        given.refuse(name, f"must be text, or a list of parts of type {' or '.join(kinds)}")
        return ""
    return "\n".join(filter(None, (read_part(part, kinds) for part in given.objects(name))))


def read_part(part: Body, kinds: Collection[str]) -> str:
    """The text of one part."""
    kind = part.text("type")
    if kind not in kinds:
        part.refuse("type", f"must be {' or '.join(kinds)}; the model reads text only")
        return ""
    return _read_document(part) if kind == "document" else part.needed_text("text")


def _read_document(part: Body) -> str:
    """Title, context and text of a document as Anthropic has them."""
    source = part.object("source")
    kind = None if source is None else source.text("type")
    if source is None or kind not in ("text", "content"):
        part.refuse("source", 'must hold plain text: {"type": "text", "media_type": "text/plain", "data": "..."}')
        return ""
    text = source.needed_text("data") if kind == "text" else read_text(source, "content", ("text",))
    return "\n".join(filter(None, (part.text("title"), part.text("context"), text)))


class Step(Enum):
    """An event of a block."""

    OPEN = 0
    ADD = 1
    CLOSE = 2


@dataclass(slots=True)
class Block:
    """A block of an answer."""

    index: int
    call: ToolCall | None = None  # None: text
    is_thought: bool = False  # the text is the model's thoughts
    text: str = ""  # so far; the arguments of a call, as JSON


Steps = Iterator[tuple[Step, Block, str]]


class Blocks:
    """Turns pieces of text into events of blocks: (step, block, added text). Read them before the next piece.

    One block is open at a time, the last of ``found``.
    """

    def __init__(self, form: AnswerForm, whole: bool = False) -> None:
        """whole: the arguments of a call come in one piece, not as written."""
        self.parser = form.parser(whole=whole)
        self._is_open = False
        self.found: list[Block] = []

    @staticmethod
    def of(form: AnswerForm, text: str, token_ids: Sequence[int]) -> Blocks:
        """The blocks of a complete answer."""
        blocks = Blocks(form, whole=True)
        for _ in (*blocks.push(text, token_ids), *blocks.end()):
            pass
        return blocks

    def push(self, text: str, token_ids: Sequence[int]) -> Steps:
        """Add a piece of text, and the tokens that it is made of."""
        yield from self._take(self.parser.push(text, token_ids))

    def end(self) -> Steps:
        """End the text."""
        yield from self._take(self.parser.flush())
        yield from self._close()

    def _take(self, parts: Sequence[Part]) -> Steps:
        for part in parts:
            if isinstance(part, ToolCall):
                yield from self._open(part)
                if part.arguments:
                    yield self._add(part.arguments)
            elif isinstance(part, CallArguments):
                yield self._add(part.text)
            elif isinstance(part, CallEnd):
                yield from self._close()
            elif isinstance(part, Thought):
                yield from self._write(part.text, is_thought=True)
            else:
                yield from self._write(part, is_thought=False)

    def _write(self, text: str, *, is_thought: bool) -> Steps:
        if not self._is_open or self.found[-1].call is not None or self.found[-1].is_thought != is_thought:
            yield from self._open(None, is_thought)
        yield self._add(text)

    def _open(self, call: ToolCall | None, is_thought: bool = False) -> Steps:
        yield from self._close()
        self.found.append(Block(len(self.found), call, is_thought))
        self._is_open = True
        yield Step.OPEN, self.found[-1], ""

    def _add(self, text: str) -> tuple[Step, Block, str]:
        self.found[-1].text += text
        return Step.ADD, self.found[-1], text

    def _close(self) -> Steps:
        if self._is_open:
            self._is_open = False
            yield Step.CLOSE, self.found[-1], ""
