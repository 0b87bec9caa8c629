"""Turns gaps into prompts within a token budget."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from server.completion.documents import ContextFile, FillMode, Gap
from server.completion.prompt_parts import PrefixParts, UserText
from specdec.core.types import StoppingParams
from specdec.errors import RequestError
from specdec.models.fim import FimTokens
from specdec.models.tokenizer import Tokenizer

_HASH = (
    "python", "py", "ruby", "rb", "shellscript", "sh", "bash", "zsh", "yaml", "yml", "perl", "pl", "r", "toml",
    "makefile", "dockerfile", "elixir", "ex", "nix", "cmake",
)  # fmt: skip
_DASH = ("sql", "lua", "haskell", "hs", "ada")
_MARKS = dict.fromkeys(_HASH, "#") | dict.fromkeys(_DASH, "--")


def comment_mark(language: str, path: str) -> str:
    """The line comment mark of ``language``, or of ``path``'s extension if that is empty."""
    name = language or path.rsplit("/", 1)[-1].rsplit(".", 1)[-1]
    return _MARKS.get(name.lower(), "//")


SMALLEST_PART = 32  # least tokens of a truncated context file
CHARACTERS_PER_TOKEN = 8  # more than any text has on average


@dataclass(frozen=True, slots=True)
class PackedFiles:
    """Context files of a prompt."""

    ids: list[int]
    texts: list[tuple[int, ...]]  # the ids of each file's text, without what announces it


@dataclass(frozen=True, slots=True)
class PackedPrompt:
    """A prompt that asks to fill a gap, or for the next edit."""

    ids: tuple[int, ...]
    ends: tuple[int, ...] = ()  # token ids that end the filling
    healing_prefix: str = ""  # the word that the gap is in: left out of ``ids``, the filling begins with it
    n_healing_tokens: int = 0  # tokens of ``healing_prefix`` by itself, which are decoded before the first new text
    omitted: tuple[int, ...] | None = None  # as in `Request`
    # Ids of the text before the gap, of that after it, and of the context files, for `PromptPacker.omitted`
    shown: tuple[Sequence[int], Sequence[int], Sequence[tuple[int, ...]]] = field(
        default=((), (), ()), compare=False, repr=False
    )

    def limits(self, stopping: StoppingParams) -> StoppingParams:
        """``stopping`` with the prompt's own ends, and not counting the tokens of the healing prefix."""
        healing, most, least = self.n_healing_tokens, stopping.max_tokens, stopping.min_tokens
        return replace(
            stopping,
            max_tokens=most + healing if most else most,
            min_tokens=least + healing if least else least,
            stop_token_ids=tuple(dict.fromkeys((*stopping.stop_token_ids, *self.ends))),
        )


class FimNotSupportedError(RequestError):
    """The model cannot fill in the middle; the message names alternatives."""

    reason = "FIM_NOT_SUPPORTED"
    http_status, grpc_code, field = 422, "FAILED_PRECONDITION", "suffix"


DEFAULT_TOKENS = 2048
SMALLEST_BUDGET = 64
INLINE_CHARACTERS = 4096


class PromptPacker:
    """Lays out fill-in-the-middle prompts for one model. Thread-safe.

    A prompt consists of: the begin token, context, the file's mark, then in the template's order the prefix without
    its head, the suffix, the middle token and the head. The *head* is the last lines before the gap, presented as the
    start of the middle (models are trained on middles that start anywhere). Typing therefore appends tokens to the
    prompt, and the prefix cache covers all before them, including the suffix. A sequence that was started before a
    keystroke remains the right one if the user types its text. The prompt omits the word that the gap is in; the
    answer repeats it first (`Request.healing_prefix`), in the tokens of the whole word.

    Suffix and context get at most a quarter of the budget each, the prefix the rest. Tokens that the prefix does not
    need go to the suffix, then to the context, in steps of an eighth, so that the shares stay while the prefix grows.
    A prompt depends on gap and budget alone: sessions and single requests get the same prompts.
    """

    def __init__(self, tokenizer: Tokenizer, max_context: int) -> None:
        self._tokens = FimTokens.of(tokenizer)
        self._prefix_only = FimTokens.prefix_only(tokenizer)
        self.max_context = max_context  # tokens
        self._text = UserText(tokenizer, self._tokens.names | self._prefix_only.names)

    @property
    def fills_in(self) -> bool:
        """Whether prompts can contain the text after a gap."""
        return self._tokens.fills_in

    def encode_text(self, text: str, owner: str = "") -> tuple[int, ...]:
        """Ids of a text that continues a prompt."""
        return self._text.encode(text, owner)

    def pack_files(
        self, files: Sequence[ContextFile], mark: tuple[int, ...], room: int, owner: str = ""
    ) -> PackedFiles:
        """Context files, each after ``mark`` and a line with its name, at most ``room`` tokens in all."""
        opened = [(file, (*mark, *self._text.encode(file.name + "\n", owner))) for file in files if file.text.strip()]
        return self._pack_opened(opened, room, owner)

    def omitted(self, gap: Gap, packed: PackedPrompt) -> tuple[int, ...]:
        """As `Request.omitted`: what the prompt does not show of ``gap``."""
        prefix, suffix, files = packed.shown
        return (
            max(0, gap.prefix.count("\n") - packed.healing_prefix.count("\n") - self._text.line_breaks(prefix)),
            max(0, gap.suffix.count("\n") - self._text.line_breaks(suffix)),
            self.omitted_lines(gap.files, files),
            0,
        )

    def omitted_lines(self, files: Sequence[ContextFile], texts: Sequence[Sequence[int]]) -> int:
        """Lines of ``files`` that ``texts``, as in `PackedFiles`, lack."""
        lines = sum(file.text.count("\n") + (not file.text.endswith("\n")) for file in files if file.text.strip())
        return max(0, lines - sum(map(self._text.line_breaks, texts)))

    def budget(self, wanted: int | None, max_tokens: int) -> int:
        """Tokens for a prompt: ``wanted`` or the default, within the context minus ``max_tokens``, of which at most a
        quarter of the context is reserved."""
        written = min(max(1, max_tokens), self.max_context // 4)
        return min(wanted or DEFAULT_TOKENS, self.max_context - written)

    def is_quick(self, gap: Gap, owner: str = "") -> bool:
        """Whether `pack` takes at most a millisecond or two, because the text is short or its encoding cached."""
        texts = [file.text for file in gap.files]
        unknown = sum(len(text) for text in texts if not self._text.knows(text, owner))
        return unknown + len(gap.prefix) + len(gap.suffix) <= INLINE_CHARACTERS

    def pack(self, gap: Gap, mode: FillMode, budget: int, owner: str = "", *, heal: bool = True) -> PackedPrompt:
        """The prompt for ``gap``, at most ``budget`` tokens.

        owner: scope of cached encodings. heal: omit the word that the gap is in.

        Raises:
            FimNotSupportedError: the model cannot fill in, and ``mode`` requires it.
        """
        if mode is FillMode.MIDDLE and not self.fills_in:
            raise FimNotSupportedError(
                "the model has no tokens for filling in the middle of a text; serve one that was trained to, such as "
                "qwen2.5-coder-1.5b, or ask to continue the text before the gap alone (leave out suffix; on gRPC, "
                "completion.mode MODE_PREFIX)"
            )
        tokens = self._prefix_only if mode is FillMode.PREFIX else self._tokens
        frame = self._frame(gap, tokens, owner)
        if sum(map(len, frame)) > budget // 2:  # the names leave too little room
            gap = replace(gap, files=(), repo="", path="")
            frame = self._frame(gap, tokens, owner)
        room = max(1, budget - sum(map(len, frame)))
        parts = PrefixParts.of(
            gap.prefix, self._text, window=room * CHARACTERS_PER_TOKEN, chunk=room // 2, head_from=gap.head_from,
            heal=heal, spaced=tokens.template.spaced, owner=owner,
        )  # fmt: skip
        suffix, context = self._beside(gap, tokens, parts, room, owner)
        above, head = parts.fit(room - len(suffix) - len(context.ids))
        ids, healing_prefix = self._layout(tokens, frame, context.ids, above, suffix, head), parts.healing_prefix
        if not ids:  # a prompt needs a token: one of the file's name, or of the word
            ids = list(self._opening(gap.path, gap, tokens, owner)[:budget])
        if not ids:
            ids, healing_prefix = list(self._text.encode(healing_prefix, owner)), ""
        n_healing_tokens = len(self._text.encode(healing_prefix, owner))
        shown = ([*above, *head], suffix, context.texts)
        return PackedPrompt(tuple(ids), tokens.ends, healing_prefix, n_healing_tokens, shown=shown)

    def _beside(
        self, gap: Gap, tokens: FimTokens, parts: PrefixParts, room: int, owner: str
    ) -> tuple[list[int], PackedFiles]:
        """Ids of the suffix, and the context."""
        step = max(1, room // 8)
        needed = parts.n_above + max(len(parts.head), room // 8) if parts.whole else room
        spare = max(0, room // 2 - needed) // step * step
        suffix = self._suffix(gap.suffix, room // 4 + spare, owner) if tokens.fills_in else []
        spare -= min(spare, max(0, len(suffix) - room // 4))
        if not tokens.fills_in:
            spare += room // 4
        files = [(file, self._opening(file.name, gap, tokens, owner)) for file in gap.files if file.text.strip()]
        return suffix, self._pack_opened(files, room // 4 + spare, owner)

    def _pack_opened(self, files: Sequence[tuple[ContextFile, tuple[int, ...]]], room: int, owner: str) -> PackedFiles:
        """The files, each after the ids paired with it, at most ``room`` tokens in all.

        Files with the highest score are chosen first, then the newest, then the last listed. The first file that does
        not fit is truncated after a line, and the remaining files are left out. Their order is independent of that, so
        that a client that ranks its files differently at each keystroke still gets the same prompt.
        """
        order = sorted(range(len(files)), key=lambda i: (files[i][0].score, files[i][0].time_ms, i), reverse=True)
        chosen: list[tuple[tuple[str, int], tuple[int, ...], int]] = []
        for i in order:
            file, opening = files[i]
            shown = file.text[: max(1, room) * CHARACTERS_PER_TOKEN]
            ids = opening + self._text.encode(shown if shown.endswith("\n") else shown + "\n", owner)
            fits = len(ids) <= room
            if not fits:
                ids = ids[: self._text.line_end(ids, len(opening), room)] if room >= SMALLEST_PART else ()
            if len(ids) > len(opening):
                chosen.append(((file.name, zlib.crc32(file.text.encode("utf-8", "surrogatepass"))), ids, len(opening)))
                room -= len(ids)
            if not fits:
                break
        chosen.sort()
        return PackedFiles([token for _, ids, _ in chosen for token in ids], [ids[at:] for _, ids, at in chosen])

    def _suffix(self, suffix: str, room: int, owner: str) -> list[int]:
        """The suffix's first tokens; truncated after a line."""
        shown = suffix[: room * CHARACTERS_PER_TOKEN]
        if len(shown) < len(suffix):
            shown = shown[: shown.rfind("\n") + 1] or shown
        ids = self._text.encode(shown, owner)
        if len(ids) <= room:
            return list(ids)
        return list(ids[: self._text.line_end(ids, room - room // 4, room)])

    def _frame(self, gap: Gap, tokens: FimTokens, owner: str) -> tuple[list[int], list[int], list[int]]:
        """Ids before the context, ids between context and prefix, and the template's separators."""
        marks = [i for i in (tokens.prefix, tokens.suffix, tokens.middle) if i >= 0]
        begin = list(self._text.begin)
        if not gap.files and not gap.repo:
            return begin, [], marks
        if tokens.repo >= 0 and gap.repo:
            name = gap.repo + ("\n" if tokens.template.newline else "")
            begin += [tokens.repo, *self._text.encode(name, owner)]
        if tokens.template.opens_file:
            return begin, [*self._opening(gap.path, gap, tokens, owner)], marks
        return begin, [tokens.file] if tokens.file >= 0 else [], marks

    def _opening(self, name: str, gap: Gap, tokens: FimTokens, owner: str) -> tuple[int, ...]:
        """Ids that announce a file."""
        if tokens.file >= 0:
            return (tokens.file, *self._text.encode(name + "\n", owner))
        heading = tokens.template.heading
        if heading is None:
            heading = comment_mark(gap.language, gap.path) + " {}\n"
        return self._text.encode(heading.replace("{}", name), owner) if name else ()

    def _layout(
        self,
        tokens: FimTokens,
        frame: tuple[list[int], list[int], list[int]],
        context: list[int],
        above: list[int],
        suffix: list[int],
        head: list[int],
    ) -> list[int]:
        begin, own, _ = frame
        around = [*context, *own]
        if not tokens.fills_in:
            return [*begin, *around, *above, *head]
        if tokens.template.suffix_first:
            middle = [tokens.middle] if tokens.middle >= 0 else []
            return [*begin, tokens.suffix, *suffix, tokens.prefix, *around, *above, *middle, *head]
        if tokens.file >= 0:
            return [*begin, *around, tokens.prefix, *above, tokens.suffix, *suffix, tokens.middle, *head]
        return [*begin, tokens.prefix, *around, *above, tokens.suffix, *suffix, tokens.middle, *head]
