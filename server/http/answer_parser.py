"""Finds the model's thoughts and tool calls in an answer's text, while it is generated."""

from __future__ import annotations

import functools
import re
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import orjson

from server.http.tool_parameters import CLOSING, ENDS, MAX_NAME, OPENING, ParameterText, ParameterTypes
from server.json_body import MAX_DEPTH
from specdec.models.tool_forms import ToolForm

Result = TypeVar("Result")
Reading = Generator[None, None, Result]
_FUNCTION = "<function="
_NAME = re.compile(rf'[^\s<>{{}}\[\]"]{{0,{MAX_NAME}}}(?=[\s<>{{}}\[\]"])')
_KEY = re.compile(rf"[^>\n]{{0,{MAX_NAME}}}(?=[>\n])")
Schemas = Mapping[str, Mapping[str, Any]]  # of arguments, by the tools' names


@dataclass(frozen=True, slots=True)
class Thought:
    """The next piece of the model's thoughts."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call, or the begin of one whose arguments follow in pieces."""

    index: int  # in the answer, from 0
    call_id: str
    name: str
    arguments: str = ""  # JSON


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments, in JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a call's arguments."""

    index: int
    raw: str  # the call's text, marks included
    is_whole: bool  # the arguments are JSON and complete


def as_object(arguments: str) -> dict[str, Any]:
    """The arguments of a call, for dialects in which they are an object: anything else is wrapped in one."""
    found = _loaded(arguments)
    return found if isinstance(found, dict) else {"value": arguments if found is _BAD else found}


Part = str | Thought | ToolCall | CallArguments | CallEnd


def new_call_id(form: ToolForm | None) -> str:
    """A fresh id of a call. Mistral's templates require nine letters and digits."""
    digits = uuid.uuid4().hex
    return digits[:9] if form in (ToolForm.MISTRAL, ToolForm.MISTRAL_ARGS) else f"call_{digits[:24]}"


@dataclass(frozen=True, slots=True)
class ThoughtMarks:
    """What stands around the model's thoughts, with which an answer begins."""

    opening: str
    closing: str
    closing_id: int  # its token
    are_open: bool  # the prompt ends inside of the thoughts


class AnswerParser:
    """Turns pieces of text into thoughts, text and calls, in order, as soon as they are unambiguous.

    White space around thoughts and calls is dropped. A call comes as begin, arguments and end. It begins when its name
    is known and its arguments begin. Text before that which is no call after all remains text, marks included.

    If ``whole``, a call comes as a `ToolCall` when it is complete; an incomplete one remains text.
    """

    def __init__(
        self,
        form: ToolForm | None,
        tools: Schemas,
        max_calls: int | None = None,
        *,
        whole: bool = False,
        thoughts: ThoughtMarks | None = None,
    ) -> None:
        """form: None: there are no calls. tools: the only ones that are called without a mark. max_calls: everything
        after them is dropped. thoughts: None: there are none."""
        self._form, self._tools, self._max_calls, self._whole = form, tools, max_calls, whole
        self._held = ""  # not yet looked at
        self._raw: list[str] = []  # looked at, and part of what may be a call
        self._begun = ToolCall(0, "", "")  # the last one
        self._open: list[str] | None = None  # the arguments so far of the call that has begun
        self._types: dict[str, ParameterTypes] = {}
        self._parts: list[Part] = []
        self._ended = self._silent = False
        self.calls = 0  # that have begun
        self.whole_calls = 0  # that are complete
        self._thoughts, self._has_thoughts = thoughts, False
        self._tokens = self._thought_end = 0  # tokens so far, and those up to the mark after the thoughts
        self._work = self._answer()

    @property
    def thought_tokens(self) -> int:
        """Tokens of the thoughts so far, marks included."""
        return (self._thought_end or self._tokens) if self._has_thoughts else 0

    def push(self, text: str, token_ids: Sequence[int] = ()) -> list[Part]:
        """Take the next piece, and the tokens that it is made of."""
        if self._thoughts is not None and not self._thought_end and self._thoughts.closing_id in token_ids:
            self._thought_end = self._tokens + token_ids.index(self._thoughts.closing_id) + 1
        self._tokens += len(token_ids)
        self._held += text
        return self._advance()

    def flush(self) -> list[Part]:
        """End the text. A call that lacks only its closing mark counts."""
        self._ended = True
        return self._advance()

    def _advance(self) -> list[Part]:
        next(self._work, None)
        parts, self._parts = self._parts, []
        return parts

    # The readers are generators that yield when they need more text; once `_ended`, they get none.

    def _answer(self) -> Reading[None]:
        if self._thoughts is not None:
            yield from self._think(self._thoughts)
        yield from _READERS[self._form](self)

    def _think(self, marks: ThoughtMarks) -> Reading[None]:
        """Read the thoughts that the answer begins with, if it does."""
        if not marks.are_open:
            yield from self._space()
            if not (yield from self._mark(marks.opening)):
                self._held, self._raw = "".join(self._raw) + self._held, []  # the white space is the answer's
                return
        self._has_thoughts = True
        yield from self._space()
        yield from self._text_until(marks.closing, kind=Thought)
        yield from self._space()
        self._raw = []

    def _plain(self) -> Reading[None]:
        """Read text without calls."""
        while True:
            if self._held:
                self._emit(self._held)
            self._held = ""
            yield

    def _hermes(self) -> Reading[None]:
        """Small models leave out the marks, or write a fence instead. Without the mark only calls of known tools count,
        at the answer's beginning or after another call."""
        marked = False
        while True:
            yield from self._space()
            marked = marked or bool((yield from self._mark("<tool_call>")))
            yield from self._space()
            yield from self._mark("```json\n", "```\n")
            if self._end((yield from self._object(known=not marked))):
                yield from self._drop("```")
                yield from self._drop("</tool_call>")
                marked = False
            elif (yield from self._text_until("<tool_call>")):
                marked = True
            else:
                return

    def _llama(self) -> Reading[None]:
        tag, marked = "<|python_tag|>", True
        while marked:
            yield from self._space()
            yield from self._mark(tag)
            while self._end((yield from self._object(known=True))):
                yield from self._space()
                yield from self._mark(";", tag)
            marked = bool((yield from self._text_until(tag)))

    def _mistral(self) -> Reading[None]:
        while (yield from self._text_until("[TOOL_CALLS]")):
            yield from self._space()
            if (yield from self._mark("[")):
                while self._end((yield from self._object())):
                    yield from self._space()
                    if (yield from self._mark(",", "]")) != ",":
                        break
            elif self._held.startswith("{"):
                self._end((yield from self._object()))
            else:
                name, mark = yield from self._name("[ARGS]", "[CALL_ID]")
                if mark == "[CALL_ID]":
                    yield from self._name("[ARGS]")
                self._end((yield from self._arguments(name)))

    def _qwen_xml(self) -> Reading[None]:
        """Small models leave out the mark. Without it only calls of known tools count, at a line's beginning."""
        while True:
            yield from self._space()
            mark = yield from self._mark("<tool_call>", _FUNCTION)
            if not mark:
                self._end(False)
                mark = yield from self._text_until("<tool_call>", f"\n{_FUNCTION}")
            if not mark:
                return
            yield from self._space()
            is_marked = mark == "<tool_call>"
            if not is_marked or (yield from self._mark(_FUNCTION)):
                name, closed = yield from self._name(">")
                is_call = bool(closed) and (is_marked or name in self._tools)
                if self._end(is_call and (yield from self._parameters(name))):
                    yield from self._drop("</tool_call>")
            else:
                self._end(False)

    # Parts of the readers:

    def _text_until(self, *marks: str, kind: Callable[[str], Part] = str) -> Reading[str]:
        """Emit the text up to the first of ``marks``, as ``kind``, and take that; empty: there is none."""
        self._raw = []
        while True:
            first = _any_of(marks).search(self._held)
            found, begin, end = (first[0], *first.span()) if first else ("", len(self._held), 0)
            before, after = self._held[:begin], self._held[end:]
            if self._ended and not found:
                if before and not ((self.calls or kind is Thought) and before.isspace()):
                    self._emit(kind(before))
                self._held = ""
                return ""
            kept = 0 if found else _begun(before, *marks)
            text = before[: len(before) - kept].rstrip()
            if text:
                self._emit(kind(text))
            self._held = before[len(text) :]
            if found:
                self._raw, self._held = [self._held, found], after
                return found
            yield

    def _take(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        self._raw.append(taken)
        return taken

    def _space(self) -> Reading[None]:
        """Take white space, until other text follows or the text ends."""
        while True:
            self._take(len(self._held) - len(self._held.lstrip()))
            if self._held or self._ended:
                return
            yield

    def _mark(self, *marks: str) -> Reading[str]:
        """Take the one of ``marks`` that comes next; empty: none does."""
        while True:
            for mark in marks:
                if self._held.startswith(mark):
                    return self._take(len(mark))
            if self._ended or not any(mark.startswith(self._held) for mark in marks):
                return ""
            yield

    def _drop(self, mark: str) -> Reading[None]:
        """Drop white space and ``mark``, if the mark follows, or as much of it as there is before the text's end."""
        while True:
            rest = self._held.lstrip()
            if rest.startswith(mark) or (self._ended and mark.startswith(rest)):
                self._held = rest[len(mark) :]
                return
            if not mark.startswith(rest):
                return
            yield

    def _name(self, *marks: str, pattern: re.Pattern[str] = _NAME) -> Reading[tuple[str, str]]:
        """Take a name and the mark after it, which is empty if none of ``marks`` follows. Both are empty if the name is
        too long."""
        while (found := pattern.match(self._held)) is None and not self._ended and len(self._held) <= MAX_NAME:
            yield
        if found is None:
            self._take(MAX_NAME)
            return "", ""
        return self._take(found.end()), (yield from self._mark(*marks))

    def _value(self, sink: Callable[[str], None]) -> Reading[bool]:
        """Take one JSON value and pass its pieces to ``sink``; whether it is complete."""
        scanner = JsonScanner()
        while True:
            if size := scanner.feed(self._held):
                sink(self._take(size))
            if scanner.over or self._ended:
                return scanner.over and not scanner.is_deep
            yield

    def _captured(self) -> Reading[Any]:
        """Take one JSON value; `_BAD` if it is invalid."""
        pieces: list[str] = []
        return _loaded("".join(pieces)) if (yield from self._value(pieces.append)) else _BAD

    def _streamed(self) -> Reading[bool]:
        """Take one JSON value as the arguments of the open call; whether it is valid."""
        over = yield from self._value(self._argue)
        return over and _loaded("".join(self._open or ())) is not _BAD

    def _arguments(self, name: str) -> Reading[bool]:
        """Take a JSON object, the arguments of ``name``; whether it is whole."""
        if name:
            yield from self._space()
        if not name or not self._held.startswith("{"):
            return False
        self._begin(name)
        return (yield from self._streamed())

    def _parameters(self, name: str) -> Reading[bool]:
        """Take the parameters of ``name``, each in tags, and one of `ENDS`; whether they are whole."""
        yield from self._space()
        mark, before = (yield from self._mark(OPENING, *ENDS)), "{"
        if name not in self._types:
            self._types[name] = ParameterTypes(self._tools.get(name, {}))
        types = self._types[name]
        while mark == OPENING:
            key, closed = yield from self._name(">", pattern=_KEY)
            if not key or not closed:
                return False
            self._begin(name)
            self._argue(f"{before}{orjson.dumps(key).decode()}: ")
            mark, before = (yield from self._parameter(ParameterText(types.of(key)))), ", "
        if mark:
            self._begin(name)
            self._argue("{}" if before == "{" else "}")
        return bool(mark)

    def _parameter(self, value: ParameterText) -> Reading[str]:
        """Take a value and the tags that end it; return the second one. Empty: the value has no end."""
        yield from self._mark("\n")
        while True:
            before, found, _ = self._held.partition(CLOSING)
            size = len(before.removesuffix("\n") if found else before)
            if not found and not self._ended:
                size -= _begun(before, CLOSING, f"\n{CLOSING}")
            if size:
                self._argue(value.push(self._take(size)))
            if found:
                closing, count = self._take(len(before) - size + len(CLOSING)), len(self._raw)
                yield from self._space()
                if mark := (yield from self._mark(OPENING, *ENDS)):
                    self._argue(value.end())
                    return mark
                self._held = "".join(self._raw[count:]) + self._held  # the value goes on
                del self._raw[count:]
                if not self._ended:
                    self._argue(value.push(closing))
            if self._ended:
                self._take(len(self._held))
                return ""
            if not found:
                yield

    def _object(self, known: bool = False) -> Reading[bool]:
        """Take ``{"name": ..., "arguments": ...}``; whether it is a complete call. ``known``: only of a known tool and
        without further fields.

        The outer braces may be doubled, as in some templates' instructions, and the closing one may be missing."""
        yield from self._space()
        mark = yield from self._mark("{")
        is_doubled = bool(mark and (yield from self._mark("{")))
        name: str | None = None
        arguments = "{}"  # while none, or those that stand before the name
        while mark in ("{", ","):
            yield from self._space()
            key = yield from self._captured()
            yield from self._space()
            if not isinstance(key, str) or (known and key not in _KEYS) or not (yield from self._mark(":")):
                return False
            yield from self._space()
            if key in _ARGUMENTS and name is not None and self._held.startswith(("{", "[")):
                self._begin(name)
                if not (yield from self._streamed()):
                    return False
            elif (value := (yield from self._captured())) is _BAD:
                return False
            elif key in _ARGUMENTS:
                # Some models write JSON text in a string, or null for none.
                whole = "{}" if value is None else value
                arguments = whole if isinstance(whole, str) else orjson.dumps(whole).decode()
            elif key == "name":
                if not isinstance(value, str) or not value or (known and value not in self._tools):
                    return False
                name = value
            yield from self._space()
            mark = yield from self._mark(",", "}", "</tool_call>", "```")
        if name is None or (mark != "}" and self._open is None) or (not mark and self._held):
            return False
        if is_doubled:
            yield from self._drop("}")
        if self._open is None:
            self._begin(name)
            self._argue(arguments)
        return True

    def _begin(self, name: str) -> None:
        if self._open is None:
            self._open = []
            self._begun = ToolCall(self.calls, new_call_id(self._form), name)
            self.calls += 1
            if not self._whole:
                self._emit(self._begun)

    def _argue(self, text: str) -> None:
        assert self._open is not None  # a call has begun
        self._open.append(text)
        if text and not self._whole:
            self._emit(CallArguments(self.calls - 1, text))

    def _end(self, is_whole: bool) -> bool:
        """End what was taken as a call or as text; whether it is a complete call."""
        raw, begun, arguments = "".join(self._raw), self._open is not None, "".join(self._open or ())
        self._raw, self._open = [], None
        if begun:
            if not self._whole:
                self._emit(CallEnd(self.calls - 1, raw, is_whole))
            elif is_whole:
                self._emit(replace(self._begun, index=self.whole_calls, arguments=arguments))
            else:
                self._emit(raw)
            self.whole_calls += is_whole and not self._silent
            self._silent = self._silent or self.calls == self._max_calls
        elif raw and not (self._ended and self.calls and raw.isspace()):
            self._emit(raw)
        return begun and is_whole

    def _emit(self, part: Part) -> None:
        if not self._silent:
            self._parts.append(part)


_READERS: Mapping[ToolForm | None, Callable[[AnswerParser], Reading[None]]] = {
    None: AnswerParser._plain,
    ToolForm.HERMES: AnswerParser._hermes,
    ToolForm.LLAMA: AnswerParser._llama,
    ToolForm.MISTRAL: AnswerParser._mistral,
    ToolForm.MISTRAL_ARGS: AnswerParser._mistral,
    ToolForm.QWEN_XML: AnswerParser._qwen_xml,
}
_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)
_BAD = object()


def _loaded(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return _BAD


@functools.cache
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))


def _begun(text: str, *marks: str) -> int:
    """Length of the longest begin of one of ``marks`` that ``text`` ends with."""
    sizes = range(max(map(len, marks)) - 1, 0, -1)
    return next((size for size in sizes for mark in marks if size < len(mark) and text.endswith(mark[:size])), 0)


_MARK = re.compile(r'\\.?|["{}\[\]]', re.DOTALL)
_SCALAR = re.compile(r'[^\s,:{}\[\]"]*')


class JsonScanner:
    """Finds the end of a JSON value that comes in pieces, from its quotes and brackets."""

    def __init__(self) -> None:
        self._depth = 0
        self._began = self._quoted = self._escaped = False
        self.over = False  # whether the value has ended
        self.is_deep = False  # whether it is nested deeper than `MAX_DEPTH`

    def feed(self, text: str) -> int:
        """Number of characters of ``text`` that belong to the value."""
        if self.over or not text:
            return 0
        if not self._depth and not self._quoted and (self._began or text[0] not in '{["'):
            found = _SCALAR.match(text)  # a number or a word, or nothing
            assert found is not None
            self._began, self.over = True, found.end() < len(text)
            return found.end()
        begin, self._escaped, self._began = int(self._escaped), False, True
        for found in _MARK.finditer(text, begin):
            mark = found[0]
            if mark.startswith("\\"):
                self._escaped = mark == "\\"  # the last character: the next piece begins with what it escapes
            elif mark == '"':
                self._quoted = not self._quoted
            elif not self._quoted:
                self._depth += 1 if mark in "{[" else -1
                self.is_deep |= self._depth > MAX_DEPTH
            self.over = not self._quoted and not self._depth
            if self.over:
                return found.end()
        return len(text)
