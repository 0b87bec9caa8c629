"""Text to token ids and back, by the `tokenizers` library, and the raw bytes of single tokens."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakSet

import tokenizers

from specdec.errors import FieldViolation, InvalidRequestError, ModelError
from specdec.models.chat_template import ChatTemplate, plain_messages
from specdec.models.tool_forms import ToolForm, fit_calls, tool_form, without_tools


@dataclass(frozen=True)
class TokenizerInfo:
    """Settings that a ``tokenizer.json`` does not hold."""

    bos_id: int | None = None
    add_bos: bool = False  # whether prompts begin with ``bos_id``
    eos_ids: tuple[int, ...] = ()
    chat_template: str | None = None  # Jinja source
    tool_template: str | None = None  # that of requests with tools, where it is another
    template_variables: dict[str, str] = field(default_factory=dict)  # special tokens by name, such as bos_token
    end_id: int | None = None  # ends every text to be embedded
    pooling: str = ""  # as `EngineInfo.pooling`


_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update((chr(0x100 + i), byte) for i, byte in enumerate(rest))
    return alphabet


class TokenBytes:
    """Maps a token's vocabulary string to its bytes, like the tokenizer's decoder."""

    def __init__(self, decoder: dict[str, Any] | None) -> None:
        text = str(decoder)
        self._byte_level = "'ByteLevel'" in text
        self._spaces = "▁" in text or "'Metaspace'" in text
        self._byte_fallback = "'ByteFallback'" in text
        self._alphabet = byte_level_alphabet()

    def is_fallback(self, piece: str) -> bool:
        """Whether ``piece`` stands for a byte of characters that have no token of their own."""
        return self._byte_fallback and _BYTE_TOKEN.fullmatch(piece) is not None

    def of(self, piece: str) -> bytes:
        """Bytes of the vocabulary entry ``piece``, which is no special token."""
        if self._byte_level:
            values = [self._alphabet.get(char) for char in piece]
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else piece.encode()
        if self.is_fallback(piece):
            return bytes([int(piece[3:5], 16)])
        return (piece.replace("▁", " ") if self._spaces else piece).encode()


_LARGE_CHARACTERS = 1 << 12  # other threads run while texts above this are encoded


def _ids(backend: Any, text: str) -> list[int]:
    """Ids of ``text``. Large texts go through the library's batch call, which lets other threads run.

    Raises:
        InvalidRequestError: a pattern of the tokenizer backtracks too long on the text, and the library gave up.
    """
    try:
        if len(text) <= _LARGE_CHARACTERS:
            found: list[int] = backend.encode(text, add_special_tokens=False).ids
        else:
            found = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    except BaseException as error:
        if not _is_panic(error):
            raise
        why = f"the model's tokenizer.json has a pattern that cannot split this text ({error})"
        raise InvalidRequestError.of("prompt", why) from None
    return found


def _is_panic(error: BaseException) -> bool:
    """Whether it is the library's PanicException, which derives from BaseException and cannot be imported."""
    return type(error).__name__ == "PanicException"


_GUARD = "\n"
"""A character that no tokenizer strips, leaves out, or merges with a space that it puts before a text."""

_THOUGHT_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))

# Splits special tokens' names inside chat messages; a noncharacter, which Unicode reserves for internal use
_BREAK = "\ufdd0"

MAX_MERGES = 1 << 20  # of a tokenizer; Gemma 3's has half as many


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads.

    ``serialised`` is the text of a ``tokenizer.json``.

    Raises:
        ModelError: ``serialised`` is not a tokenizer.
    """

    def __init__(self, serialised: str, info: TokenizerInfo) -> None:
        try:
            data, changed = _normalise(json.loads(serialised))
            self._backend = tokenizers.Tokenizer.from_str(json.dumps(data) if changed else serialised)
        except BaseException as error:  # the library raises bare Exception
            if not isinstance(error, Exception) and not _is_panic(error):
                raise
            raise ModelError(f"tokenizer.json cannot be read ({error}); fetch the model again") from None
        self._source = hashlib.sha256(serialised.encode()).digest()
        self._backend.encode_special_tokens = True  # their names in a text are plain characters
        self._token_bytes = TokenBytes(data.get("decoder"))
        self._added = {token["id"]: token for token in data.get("added_tokens", [])}
        self._bytes: dict[int, bytes] = {}
        self.special_ids = frozenset(i for i, token in self._added.items() if token["special"])
        self._use(info)

    def _use(self, info: TokenizerInfo) -> None:
        with _LOCK:
            _IN_USE.add(self)
        self._info = info
        self.bos_id = info.bos_id
        self._prefix = [info.bos_id] if info.add_bos and info.bos_id is not None else []
        self.add_bos = bool(self._prefix)
        self.eos_ids, self.end_id, self.pooling = info.eos_ids, info.end_id, info.pooling
        self._chat_source = self._tool_source = info.chat_template or ""
        if self._chat_source and tool_form(info.tool_template or "") is not None:
            self._tool_source = info.tool_template or ""

    @staticmethod
    def shared(serialised: str, info: TokenizerInfo) -> Tokenizer:
        """A tokenizer that shares the vocabulary of one in use if that is the same; raises like the class.

        Models of a family share a vocabulary, and 150,000 tokens take most of a second and much memory.
        """
        source = hashlib.sha256(serialised.encode()).digest()
        with _LOCK:
            known = next((each for each in _IN_USE if each._source == source), None)
        return Tokenizer(serialised, info) if known is None else known.with_info(info)

    def completed_by(self, base: Tokenizer) -> Tokenizer:
        """This tokenizer with the ends of ``base`` too, and what it lacks of a chat template and a pooling."""
        own, other = self._info, base._info
        ends = dict.fromkeys((*own.eos_ids, *other.eos_ids))
        info = replace(own, eos_ids=tuple(ends), pooling=own.pooling or other.pooling)
        if own.chat_template is None:
            info = replace(
                info, chat_template=other.chat_template, tool_template=other.tool_template,
                template_variables=other.template_variables | own.template_variables,
            )  # fmt: skip
        return self.with_info(info)

    def with_info(self, info: TokenizerInfo) -> Tokenizer:
        """A tokenizer of the same vocabulary with other settings."""
        twin = copy.copy(self)
        for derived in ("_template", "_tool_template", "tool_form", "thought_marks"):
            twin.__dict__.pop(derived, None)
        twin._use(info)
        return twin

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of ``text``; with ``add_special``, after the begin token if the model has one.

        Unless ``parse_special``, a special token's name in the text is encoded as plain characters.
        """
        ids = _ids(self._parsing_backend if parse_special else self._backend, text)
        return [*self._prefix, *ids] if add_special else ids

    def encode_inside(self, text: str) -> list[int]:
        """Token ids of ``text`` inside a longer one, with exactly its bytes; [] if the tokenizer changes the text."""
        ids = self.encode(text, add_special=False)
        if not self._spells(ids, text):
            guard = self.encode(_GUARD, add_special=False)
            ids = self.encode(_GUARD + text, add_special=False)[len(guard) :]
        return ids if self._spells(ids, text) else []

    def _spells(self, ids: list[int], text: str) -> bool:
        return b"".join(map(self.token_bytes, ids)) == text.encode()

    @property
    def frame(self) -> tuple[list[int], list[int]]:
        """The ids that ``tokenizer.json`` itself puts before and after a text."""
        try:
            found = self._backend.encode("a")
        except Exception:  # the library raises it bare: neither the letter nor unknown text has a token
            found = self._backend.encode("")
        own = [at for at, is_added in enumerate(found.special_tokens_mask) if not is_added] or [len(found.ids)]
        return found.ids[: own[0]], found.ids[own[-1] + 1 :]

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest entry, and so of the longest token."""
        return max(map(len, self.vocabulary), default=1)

    @cached_property
    def _parsing_backend(self) -> Any:
        """A copy that parses special tokens: the switch for that cannot be set while another thread encodes."""
        return tokenizers.Tokenizer.from_str(self._backend.to_str())

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        """Raw bytes of one token: a special token's name, b"" for an id outside the vocabulary."""
        found = self._bytes.get(token_id)
        if found is None:
            piece = self._backend.id_to_token(token_id) if token_id >= 0 else None
            if piece is None:
                return b""
            found = piece.encode() if token_id in self.special_ids else self._token_bytes.of(piece)
            self._bytes[token_id] = found
        return found

    def token_id(self, token: str) -> int | None:
        """Id of the vocabulary entry ``token``, such as the name of a special token; None when there is none."""
        return self._backend.token_to_id(token)

    @cached_property
    def vocabulary(self) -> Mapping[str, int]:
        """The id of every entry, special ones included."""
        return self._backend.get_vocab(with_added_tokens=True)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return max(self.vocabulary.values(), default=-1) + 1

    @cached_property
    def fallback_ids(self) -> frozenset[int]:
        """Ids of the tokens for single bytes of characters that have no token of their own."""
        return frozenset(i for piece, i in self.vocabulary.items() if self._token_bytes.is_fallback(piece))

    @property
    def base_size(self) -> int:
        """One more than the highest id without added tokens."""
        return max((i for i in self.vocabulary.values() if i not in self._added), default=-1) + 1

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the mapping from token to id: equal if and only if two tokenizers share a vocabulary."""
        ordered = sorted((token_id, token) for token, token_id in self.vocabulary.items())
        return hashlib.sha256("".join(f"{token_id}\0{token}\0" for token_id, token in ordered).encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files of a Hugging Face folder. Raises OSError."""
        (folder / "tokenizer.json").write_text(self._backend.to_str(), encoding="utf-8")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": self.add_bos}
        template: Any = self._info.chat_template
        if self._info.tool_template is not None:
            named = {"default": template, "tool_use": self._info.tool_template}
            template = [{"name": name, "template": source} for name, source in named.items()]
        settings |= {**self._info.template_variables, "chat_template": template}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")

    def special_id(self, name: str) -> int | None:
        """Id of the special token ``name``; None if there is none."""
        found = self.token_id(name)
        return found if found in self.special_ids else None

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` works."""
        return self._info.chat_template is not None

    def template_mentions(self, variable: str) -> bool:
        """Whether the chat template may read ``variable``."""
        return variable in self._chat_source

    @property
    def has_tool_template(self) -> bool:
        """Whether the chat template lists tools for the model, and writes calls in a supported form."""
        return tool_form(self._tool_source) is not None

    @cached_property
    def tool_form(self) -> ToolForm:
        """The form of tool calls in the model's text."""
        return tool_form(self._tool_source) or ToolForm.HERMES

    @cached_property
    def thought_marks(self) -> tuple[int, int, tuple[int, ...]] | None:
        """The tokens of the marks before and after the model's thoughts, and the second one with the line breaks that
        the chat template writes around it. None: no such marks are tokens of their own."""
        ids = {token["content"]: i for i, token in self._added.items()}
        for opening, end in _THOUGHT_MARKS:
            if opening in ids and end in ids:
                written = re.findall(rf"(?:\\n)?{re.escape(end)}(?:\\n)*", self._chat_source)
                before, _, after = max(written, key=len, default=end).replace("\\n", "\n").partition(end)
                return ids[opening], ids[end], (*self.encode_inside(before), ids[end], *self.encode_inside(after))
        return None

    def leaves_thoughts_open(self, ids: Sequence[int]) -> bool:
        """Whether a prompt ends inside the model's thoughts. Turns begin with added tokens, so what an earlier one says
        is not mistaken for a mark."""
        last = next((token for token in reversed(ids) if token in self._added), None)
        return self.thought_marks is not None and last == self.thought_marks[0]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation, by the model's chat template.

        A message's content is text, or a list of parts ``{"type": "text", "text": ...}``. ``tools`` are the functions
        that may be called, in the form of OpenAI's API; if the template has no tools, a system message lists them.
        variables: as in `ChatTemplate.render`.

        Raises:
            ModelError: the model has no chat template, or one that does not compile.
            InvalidRequestError: the template refuses the messages, or leaves out those of a role that it does not
                support; or a part is not text.
        """
        source = self._tool_source if tools else self._chat_source
        form = tool_form(source)
        roles = {"function": "tool"}  # OpenAI's former name
        if "developer" not in source:
            roles["developer"] = "system"  # its newer name
        plain = plain_messages(
            [{**each, "role": roles[each["role"]]} if each.get("role") in roles else each for each in messages]
        )

        def render(plain: list[dict[str, Any]]) -> str:
            if form is None:
                return _with_system(self._template, without_tools(plain, tools), variables)
            template = self._tool_template if tools else self._template
            return template.render(fit_calls(plain, form), variables, tools)

        unknown = [i for i, each in enumerate(plain) if each.get("role") not in _ROLES]
        if unknown:
            _check_shown(plain, unknown, render)
        return render(plain)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation; raises like `render_chat`.

        The template's special tokens are parsed. Those spelled out in the text of a message, tool or variable are not,
        so that it cannot forge a turn.
        """
        try:
            guarded, *others = (_guard(v, self._special_starts) for v in (plain_messages(messages), tools, variables))
        except RecursionError:
            raise InvalidRequestError.of("messages", "a call's arguments are nested too deep; send less") from None
        text = self.render_chat(guarded, tools=others[0], variables=others[1])
        if _BREAK in text:
            ids = _ids(self._guarded_backend, text)
        else:
            ids = self.encode(text, add_special=False, parse_special=True)
        return ids if ids[: len(self._prefix)] == self._prefix else [*self._prefix, *ids]

    @cached_property
    def _template(self) -> ChatTemplate:
        if self._info.chat_template is None:
            raise ModelError("the model has no chat template; send a plain prompt, or use an instruct model")
        return ChatTemplate(self._info.chat_template, self._info.template_variables)

    @cached_property
    def _tool_template(self) -> ChatTemplate:
        if self._tool_source == self._chat_source:
            return self._template
        return ChatTemplate(self._tool_source, self._info.template_variables)

    @cached_property
    def _special_starts(self) -> re.Pattern[str]:
        """Matches the first character of every special token's name, overlapping names included."""
        names = [self._added[i]["content"] for i in self.special_ids]
        # In this form the library searches for first characters alone, which is fast on large texts.
        starts = [f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in names if name]
        return re.compile("|".join(starts)) if starts else re.compile(r"(?!)")

    @cached_property
    def _guarded_backend(self) -> Any:
        """A copy whose normaliser, which runs after special tokens are found, drops the break characters."""
        drop = {"type": "Replace", "pattern": {"String": _BREAK}, "content": ""}
        data = json.loads(self._backend.to_str())
        own = data.get("normalizer")
        steps = [drop] if own is None else [drop, own]
        return tokenizers.Tokenizer.from_str(
            json.dumps(data | {"normalizer": {"type": "Sequence", "normalizers": steps}})
        )


_IN_USE: WeakSet[Tokenizer] = WeakSet()
_LOCK = Lock()  # of `_IN_USE`: a server loads the tokenizers of several models at a time


def _with_system(template: ChatTemplate, messages: list[dict[str, Any]], variables: Mapping[str, Any] | None) -> str:
    """Render ``messages``. A system message that the template refuses, which may be the one that lists tools, becomes
    the beginning of the user's."""
    try:
        return template.render(messages, variables)
    except InvalidRequestError:
        if [message.get("role") for message in messages[:2]] != ["system", "user"]:
            raise
        texts = filter(None, (message["content"] for message in messages[:2]))
        first = {"role": "user", "content": "\n\n".join(texts)}
        return template.render([first, *messages[2:]], variables)


_ROLES = ("system", "user", "assistant", "tool")  # which every template should support


def _check_shown(
    messages: list[dict[str, Any]], unknown: list[int], render: Callable[[list[dict[str, Any]]], str]
) -> None:
    """Refuse messages of ``unknown`` roles that ``render`` leaves out, which many templates do silently.

    A template may change a content, such as by writing it as JSON, so marks that stay the same are rendered instead.
    """
    marked = messages.copy()
    for i in unknown:
        marked[i] = {**messages[i], "content": f"content-of-message-{i}."}
    shown = set(re.findall(r"content-of-message-(\d+)\.", render(marked)))
    problem = f"is no role of the model's chat template; use {', '.join(_ROLES[:-1])} or {_ROLES[-1]}"
    lost = [FieldViolation(f"messages[{i}].role", problem) for i in unknown if str(i) not in shown]
    if lost:
        raise InvalidRequestError(lost)


def _normalise(data: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The parsed ``tokenizer.json`` with the flags that specdec needs, and whether any of them changed.

    Tokens named like control tokens become special (Qwen's <|fim_prefix|> is not marked), special tokens match
    literally, and texts are neither truncated nor padded. Raises ValueError if there are too many merges.
    """
    if len(data["model"].get("merges") or ()) > MAX_MERGES:
        raise ValueError(f"it has more than {MAX_MERGES} merges")
    changed = data.get("truncation") is not None or data.get("padding") is not None
    for token in data.get("added_tokens", []):
        name = token["content"]
        special = token["special"] or (name.startswith("<|") and name.endswith("|>"))
        normalised = token["normalized"] and not special
        changed |= (special, normalised) != (token["special"], token["normalized"])
        token["special"], token["normalized"] = special, normalised
    return data | {"truncation": None, "padding": None}, changed


def _guard(value: Any, starts: re.Pattern[str]) -> Any:
    """``value`` with a break after the first character of each special token's name, in texts at any depth."""
    if isinstance(value, str):
        return starts.sub(lambda match: match[0] + _BREAK, value.replace(_BREAK, ""))
    if isinstance(value, Mapping):
        return {_guard(key, starts): _guard(inner, starts) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_guard(inner, starts) for inner in value]
    return value
