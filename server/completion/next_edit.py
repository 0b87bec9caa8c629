"""Next edits: builds the prompt for the window around a cursor, and finds the edits in the model's answer."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import Any

from server.completion.documents import ContextFile, OffsetUnit, TextEdit, check_length, common_length, place_of
from server.completion.prompt_packer import PackedPrompt, PromptPacker
from server.completion.time_budget import Objective
from specdec.core.fields import MAX_STOP_TEXT
from specdec.core.types import Delta, Finished, FinishReason, Request, RequestEvent
from specdec.errors import ViolationCollector
from specdec.models.next_edit import NextEditForm, form_of
from specdec.models.tokenizer import Tokenizer

WINDOW_LINES = 10  # on each side of the cursor's line
WINDOW_CHARACTERS = 8192  # the window has fewer lines where they are long
CONTEXT_LINES = 20  # on each side of the window, in forms that show them
DIFF_CONTEXT = 3  # unchanged lines on each side of a recent edit
RECENT_EDITS = 16  # the newest ones that are shown
RECENT_CHARACTERS, RECENT_LINES = 4096, 256  # of each, its lines before and after together; longer ones are ignored
SPLIT_CHARACTERS = 1 << 16  # of an edit that is split into lines: these take thirty times the memory of a text
PROBLEMS, PROBLEM_CHARACTERS = 16, 256  # of the diagnostics that are shown, and of each
MAX_PATH = 1024  # characters
SPARE_TOKENS = 128  # that the new window may be longer than the current one
MOST_LINES = 256  # of an answer in which nothing is settled; beyond, edits wait for its end
ANCHOR_LINES = 2  # equal lines, with a letter or digit each, that complete the edits before them
_INSTRUCTION = (
    "Predict what the developer changes next. Answer with the text of the editable region after that change, and with "
    "nothing else. Leave the region as it is if nothing follows from the recent edits."
)


@dataclass(frozen=True, slots=True)
class RecentEdit:
    """A change that the user made: the changed lines before and after it. A short one may be a part of a line."""

    path: str
    before: str
    after: str

    @staticmethod
    def of(path: str, before: str, after: str, diff: str = "") -> RecentEdit:
        """The changed lines of two texts, with `DIFF_CONTEXT` lines around them, or those of a unified diff of one
        file."""
        if len(diff) > SPLIT_CHARACTERS:
            return RecentEdit(path, diff, "")  # ignored
        if diff:
            return RecentEdit(path, *_sides(diff))
        before, after = _near_change(before.replace("\r\n", "\n"), after.replace("\r\n", "\n"))
        if len(before) + len(after) > SPLIT_CHARACTERS:
            return RecentEdit(path, before, after)  # ignored
        old, new = _lines(before, keepends=True), _lines(after, keepends=True)
        head = max(0, common_length(old, new) - DIFF_CONTEXT)
        tail = max(0, common_length(old[head:][::-1], new[head:][::-1]) - DIFF_CONTEXT)
        return RecentEdit(path, *("".join(lines[head : len(lines) - tail]) for lines in (old, new)))

    @property
    def diff(self) -> str:
        """A unified diff without file names."""
        lines = difflib.unified_diff(_lines(self.before), _lines(self.after), n=DIFF_CONTEXT, lineterm="")
        return "".join(line + "\n" for line in list(lines)[2:])

    @property
    def is_short(self) -> bool:
        """Whether it is part of prompts, and compared with predicted edits."""
        return (
            len(self.path) + len(self.before) + len(self.after) <= RECENT_CHARACTERS
            and self.before.count("\n") + self.after.count("\n") <= RECENT_LINES
        )

    def is_undone_by(self, old: Sequence[str], new: Sequence[str]) -> bool:
        """Whether replacing the lines ``old`` by ``new`` takes the edit, or a part of it, back."""
        before, after = _lines(self.before), _lines(self.after)
        if any((after[c:d], before[a:b]) == (old, new) for a, b, c, d in _changes(before, after)):
            return True
        was, becomes = "\n".join(old), "\n".join(new)
        inner = self.after.strip("\n")
        return bool(inner) and inner in was and was.replace(inner, self.before.strip("\n"), 1) == becomes


def _near_change(old: str, new: str) -> tuple[str, str]:
    """Both texts without most of the lines that they begin and end with alike; `DIFF_CONTEXT` of these or one more
    stay."""
    head = common_length(old, new)
    tail = common_length(old[head:][::-1], new[head:][::-1])
    above = old[:head].rsplit("\n", DIFF_CONTEXT + 1)
    below = old[len(old) - tail :].split("\n", DIFF_CONTEXT + 1)
    start = len(above[0]) + 1 if len(above) > DIFF_CONTEXT + 1 else 0
    cut = len(below[-1]) if len(below) > DIFF_CONTEXT + 1 else 0
    return old[start : len(old) - cut], new[start : len(new) - cut]


def _lines(text: str, *, keepends: bool = False) -> list[str]:
    """The lines of ``text``, which end at line feeds only, as those of the window do."""
    lines = text.split("\n")
    last = lines.pop()
    return [line + "\n" * keepends for line in lines] + [last] * bool(last)


def _sides(diff: str) -> Iterator[str]:
    """The text before and after a unified diff."""
    lines = _lines(diff.replace("\r\n", "\n"))
    # What precedes the first hunk names the file
    first = next((i for i, line in enumerate(lines) if line.startswith("@@")), 0)
    lines = [line or " " for line in lines[first:] if not line.startswith(("@@", "\\"))]
    return ("".join(line[1:] + "\n" for line in lines if line[0] in marks) for marks in (" -", " +"))


def _changes(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[int, int, int, int]]:
    """(a, b, c, d) where ``old[a:b]`` became ``new[c:d]``."""
    for tag, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            yield a, b, c, d


@dataclass(frozen=True)
class EditPlace:
    """A file, the cursor in it, and what the user did and sees."""

    path: str
    text: str
    cursor: int  # index in ``text``
    recent: tuple[RecentEdit, ...] = ()  # oldest first
    files: tuple[ContextFile, ...] = ()
    diagnostics: tuple[tuple[int, str], ...] = ()  # line, from 0, and message
    unit: OffsetUnit = OffsetUnit.CODE_POINT  # of the predicted edits
    n_older: int = 0  # edits before ``recent``, which are not shown

    @staticmethod
    def at(text: str, offset: int, unit: OffsetUnit, violations: ViolationCollector, **shown: Any) -> EditPlace:
        """The place at an offset; adds to ``violations`` what cannot be served. shown: the other fields."""
        check_length(text, "text", violations)
        cursor = place_of(text, offset, unit)
        violations.check(cursor is not None, "cursor", "must lie in the text, between characters")
        place = EditPlace(text=text, cursor=cursor or 0, unit=unit, **shown)
        violations.check(len(place.path) <= MAX_PATH, "path", f"at most {MAX_PATH} characters")
        end = text.find("\n", place.cursor)
        length = (len(text) if end < 0 else end) - text.rfind("\n", 0, place.cursor) - 1
        problem = f"its line may have {WINDOW_CHARACTERS} characters, got {length}"
        violations.check(length <= WINDOW_CHARACTERS, "cursor", problem)
        return place

    @cached_property
    def lines(self) -> list[str]:
        """The file's lines as the model sees them, without their ends."""
        return [line.removesuffix("\r") for line in self.text.split("\n")]

    def line_end(self, line: int) -> str:
        """What ends a line, or the one before it if that is the last."""
        after = self.starts[min(line + 1, len(self.starts) - 1)]
        return "\r\n" if self.text.endswith("\r\n", 0, after) else "\n"

    @cached_property
    def starts(self) -> list[int]:
        """The index of each line's first character."""
        return list(accumulate((len(line) + 1 for line in self.text.split("\n")[:-1]), initial=0))

    @cached_property
    def cursor_line(self) -> int:
        """The cursor's line, from 0."""
        return self.text.count("\n", 0, self.cursor)

    @cached_property
    def window(self) -> range:
        """The lines that the model rewrites."""
        line, last = self.cursor_line, len(self.lines) - 1
        if not self.lines[last]:
            last = max(line, last - 1)  # the empty text after the last line break is no line to rewrite
        for reach in range(WINDOW_LINES, -1, -1):
            found = range(max(0, line - reach), min(last, line + reach) + 1)
            if self.characters(found) <= WINDOW_CHARACTERS:
                break
        return found

    def characters(self, lines: range) -> int:
        return sum(len(self.lines[i]) for i in lines)

    def shown(self, lines: range, cursor: str = "") -> str:
        """The text of ``lines``, each with a line break, and ``cursor`` where the cursor is."""
        text = [self.lines[i] for i in lines]
        if cursor and self.cursor_line in lines:
            at, column = self.cursor_line - lines.start, self.cursor - self.starts[self.cursor_line]
            text[at] = text[at][:column] + cursor + text[at][column:]
        return "".join(line + "\n" for line in text)

    @property
    def last_edit(self) -> RecentEdit | None:
        """The newest edit, if it changed this file and is not too long."""
        last = self.recent[-1] if self.recent and self.recent[-1].path == self.path else None
        return last if last is not None and last.is_short else None

    @property
    def earlier_window(self) -> str:
        """The window's text before the newest edit, as far as it is known."""
        text, edit = self.shown(self.window), self.last_edit
        return text.replace(edit.after, edit.before, 1) if edit is not None and edit.after else text


# A piece of a prompt: its text, and whether it is the form's own, so that special tokens in it are read as such
Piece = tuple[str, bool]


class EditPrompt:
    """The prompt for one place in a model's form."""

    def __init__(self, place: EditPlace, model: str, tokenizer: Tokenizer, packer: PromptPacker) -> None:
        """model: the target's name, by which the form is chosen."""
        self.place, self.form = place, form_of(model, tokenizer)
        self._tokenizer, self._packer = tokenizer, packer

    def request(
        self, base: Request, owner: str = "", max_prompt_tokens: int | None = None, ttft: Objective | None = None
    ) -> Request:
        """``base`` with the prompt, its stops, and the window as its prediction; at most ``max_prompt_tokens``, except
        that the window is always whole. Files are left out first, then the oldest edits. Encodes: call it in a thread.

        owner: scope of cached encodings. ttft: limits the prompt further.
        """
        form, tokenizer = self.form, self._tokenizer
        answer = form.answer_head + self.place.shown(self.place.window) + form.answer_tail
        expected = tokenizer.encode(answer, add_special=False, parse_special=True)
        max_tokens = base.stopping.max_tokens
        if max_tokens is None:
            max_tokens = len(expected) + SPARE_TOKENS
        budget = self._packer.budget(max_prompt_tokens, max_tokens)
        stop_ids = () if not form.stop or (found := tokenizer.special_id(form.stop)) is None else (found,)
        stopping = replace(
            base.stopping,
            max_tokens=max_tokens,
            include_stop=False,  # `EditReader` adds the tail itself
            stop=(*base.stopping.stop, *filter(None, (form.stop, self.tail))),
            stop_token_ids=(*base.stopping.stop_token_ids, *stop_ids),
        )
        pack = partial(self._pack, owner=owner)
        packed = pack(budget) if ttft is None else ttft.choose(pack, budget)
        return replace(
            base,
            prompt_ids=packed.ids,
            omitted=None if ttft is None else packed.omitted,
            stopping=stopping,
            prediction_ids=tuple(expected),
        )

    @cached_property
    def tail(self) -> str:
        """The window's last lines, `ANCHOR_LINES` of them with a word: an answer with them is complete. Empty where the
        window has them elsewhere too."""
        lines = [self.place.lines[i] for i in self.place.window]
        anchors = [i for i, line in enumerate(lines) if _has_word(line)][-ANCHOR_LINES:]
        if len(anchors) < ANCHOR_LINES:
            return ""
        tail = "\n" + "".join(f"{line}\n" for line in lines[anchors[0] :])
        once = f"\n{self.place.shown(self.place.window)}".count(tail) == 1
        return tail if once and len(tail) <= MAX_STOP_TEXT else ""

    def _pack(self, budget: int, owner: str) -> PackedPrompt:
        form, begin = self.form, self._tokenizer.encode("", add_special=True)
        layout = _blocks if form.path_lines else _fim if form.files else _excerpt
        recent = [edit for edit in self.place.recent[-RECENT_EDITS:] if edit.is_short]
        while True:
            head, tail = (self._encode(pieces, owner) for pieces in layout(self.place, recent, form))
            room = budget - len(begin) - len(head) - len(tail)
            if room >= 0 or not recent:
                break
            del recent[0]
        mark = self._encode([(form.files, True)], owner)
        files = self._packer.pack_files(self.place.files, mark, max(0, room), owner)
        lines = self._packer.omitted_lines(self.place.files, files.texts)
        omitted = (0, 0, lines, self.place.n_older + len(self.place.recent) - len(recent))
        return PackedPrompt((*begin, *head, *files.ids, *tail), omitted=omitted)

    def _encode(self, pieces: Sequence[Piece], owner: str) -> tuple[int, ...]:
        ids: list[int] = []
        for text, own in pieces:
            if own:
                ids += self._tokenizer.encode(text, add_special=False, parse_special=True)
            else:
                ids += self._packer.encode_text(text, owner)
        return tuple(ids)


def _problems(place: EditPlace) -> str:
    shown = place.diagnostics[:PROBLEMS]
    return "".join(f"line {line + 1}: {message[:PROBLEM_CHARACTERS]}\n" for line, message in shown)


def _line(text: str) -> str:
    return text if text.endswith("\n") else text + "\n"


def _has_word(line: str) -> bool:
    return any(map(str.isalnum, line))


def _around(place: EditPlace) -> tuple[range, range]:
    """The lines above and below the window that are shown."""
    window, size = place.window, place.characters
    above = range(max(0, window.start - CONTEXT_LINES), window.start)
    below = range(window.stop, min(len(place.lines), window.stop + CONTEXT_LINES))
    while size(above) > WINDOW_CHARACTERS:
        above = above[1:]
    while size(below) > WINDOW_CHARACTERS:
        below = below[:-1]
    return above, below


def _blocks(place: EditPlace, recent: Sequence[RecentEdit], form: NextEditForm) -> tuple[list[Piece], list[Piece]]:
    """What comes before and after other files: recent edits, then the window as it was, as it is, and as it will be."""
    mark = (form.files, True)
    pieces: list[Piece] = []
    if place.diagnostics:
        pieces += [mark, (f"{place.path}.diagnostics\n{_problems(place)}", False)]
    for edit in recent:
        pieces += [mark, (f"{edit.path}.diff\noriginal:\n{_line(edit.before)}updated:\n{_line(edit.after)}", False)]
    window = place.shown(place.window)
    pieces += [mark, (f"original/{place.path}\n{_line(place.earlier_window)}", False)]
    pieces += [mark, (f"current/{place.path}\n{window}", False), mark, (f"updated/{place.path}\n", False)]
    return [], pieces


def _fim(place: EditPlace, recent: Sequence[RecentEdit], form: NextEditForm) -> tuple[list[Piece], list[Piece]]:
    """What comes before and after other files: the text after the window, then edits, the text before, the window."""
    mark, (above, below) = (form.files, True), _around(place)
    pieces: list[Piece] = []
    if place.diagnostics:
        pieces += [mark, (f"diagnostics\n{_problems(place)}", False)]
    if recent:
        diffs = "".join(f"--- a/{edit.path}\n+++ b/{edit.path}\n{edit.diff}" for edit in recent)
        pieces += [mark, (f"edit_history\n{diffs}", False)]
    end = (form.stop if form.answer_head else "") + form.after[0]  # a mark that begins the answer has one that ends it
    pieces += [mark, (f"{place.path}\n{place.shown(above)}", False), *_window(place, form), (end, True)]
    return [("<[fim-suffix]>\n", True), (place.shown(below), False), ("<[fim-prefix]>", True)], pieces


def _excerpt(place: EditPlace, recent: Sequence[RecentEdit], form: NextEditForm) -> tuple[list[Piece], list[Piece]]:
    """What comes before and after other files: an instruction, then edits, and the window inside its surroundings."""
    above, below = _around(place)
    edits = "".join(f'User edited "{edit.path}":\n```diff\n{edit.diff}```\n\n' for edit in recent)
    files = "### Context:" if form.opening else "### Files:"
    before = f"### Instruction:\n{_INSTRUCTION}\n\n{files}\n"
    after = f"{_problems(place)}\n### User Edits:\n\n{edits}### User Excerpt:\n\n```{place.path}\n{place.shown(above)}"
    pieces = [(after, False), *_window(place, form), (form.after[0], True), (f"\n{place.shown(below)}```\n\n", False)]
    pieces.append((f"{form.cue}\n{form.closing}", True))
    return [(form.opening, True), (before, False)], pieces


def _window(place: EditPlace, form: NextEditForm) -> list[Piece]:
    shown, mark, rest = place.shown(place.window, form.cursor).partition(form.cursor)
    return [(form.before, True), (shown, False), (mark, True), (rest, False)]


_OWN_ENDS = (FinishReason.EOS, FinishReason.STOP_TOKEN, FinishReason.STOP_STRING)
_FENCE = "```"  # instruct models put code between two, and explain it behind the second one
NO_EDITS = "NO_EDITS"  # what Zeta writes when it changes nothing


class EditReader:
    """Finds the edits in the model's text while it comes.

    An edit is complete once `ANCHOR_LINES` unchanged lines follow it. Edits apply to the file as it was sent; they are
    in order and do not overlap.
    """

    def __init__(self, prompt: EditPrompt) -> None:
        self._place, self._form, self._tail = prompt.place, prompt.form, prompt.tail
        self._old = [self._place.lines[i] for i in self._place.window]
        # Some tokenizers normalise: the model then sees, and copies, the composed form of a line.
        composed = {unicodedata.normalize("NFC", line): line for line in self._old}
        self._line_of = composed | {line: line for line in self._old}
        self._cursor = "" if any(self._form.cursor in line for line in self._old) else self._form.cursor
        self._has_fences = any(line.startswith(_FENCE) for line in self._old)
        self._at = 0  # lines of the window that are settled
        self._new: list[str] = []  # lines of the answer after those
        self._rest = ""  # the line that is being written
        self._begun = self._fenced = False  # whether its first line was seen; whether a fence precedes that
        self._open = False  # whether a fence in the answer has none that closes it
        self._over = False  # whether further lines are no part of the window

    def take(self, event: RequestEvent) -> list[TextEdit]:
        """The edits that ``event`` completes."""
        if isinstance(event, Delta):
            return self.feed(event.text)
        if not isinstance(event, Finished):
            return []
        edits = self.feed(self._tail) if self._tail and event.matched_stop == self._tail else []
        return edits + self.end(complete=event.reason in _OWN_ENDS)

    def feed(self, text: str) -> list[TextEdit]:
        """The edits that ``text``, which continues the answer, completes."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._add(line)
        return self._settle() if lines else []

    def end(self, *, complete: bool) -> list[TextEdit]:
        """The remaining edits; none if nothing visible is left. complete: the model ended the answer itself; else what
        follows its last line is kept."""
        if complete and self._rest:
            self._add(self._rest)
        if self._open and not self._has_fences and self._new and self._new[-1].startswith(_FENCE):
            self._new.pop()  # it closes the prompt's block
        if not (complete or self._over) or not any(map(str.strip, self._new)):
            return []
        changes = list(_changes(self._old[self._at :], self._new))
        if changes and self._at + changes[-1][1] == len(self._old):
            changes[-1] = self._at_the_end(*changes[-1])
        return self._edits(changes)

    def _add(self, line: str) -> None:
        if self._over:
            return
        if line.startswith(_FENCE) and not self._has_fences and (self._fenced or not self._begun):
            self._over, self._fenced = self._fenced, True
            return
        if not self._begun:
            head = self._form.answer_head
            if line + "\n" == head:
                return
            self._begun = True
            line = line.removeprefix(head.removesuffix("\n"))
            self._over = line.strip() == NO_EDITS
            if self._over:
                return
        self._open ^= line.startswith(_FENCE)
        line = line.replace(self._cursor, "") if self._cursor else line
        self._new.append(self._line_of.get(line, line))

    def _settle(self) -> list[TextEdit]:
        """The edits before the last unchanged lines so far; these and the lines before them are settled."""
        if len(self._new) > MOST_LINES:
            return []
        old, done, n_settled = self._old[self._at :], (0, 0), 0
        changes: list[tuple[int, int, int, int]] = []
        for tag, a, b, c, d in difflib.SequenceMatcher(None, old, self._new, autojunk=False).get_opcodes():
            if tag != "equal":
                changes.append((a, b, c, d))
            elif sum(map(_has_word, old[a:b])) >= ANCHOR_LINES:
                n_settled, done = len(changes), (b, d)
        edits = self._edits(changes[:n_settled])
        self._at += done[0]
        del self._new[: done[1]]
        return edits

    def _at_the_end(self, a: int, b: int, c: int, d: int) -> tuple[int, int, int, int]:
        """The change at the window's end without lines that the model added because they follow there in the file. It
        deletes no lines unless others replace them: the answer may have ended early."""
        below = self._place.lines[self._place.window.stop :]
        d = next((i for i in range(c, d) if self._new[i:d] == below[: d - i]), d)
        return (a, b, c, d) if c < d else (a, a, c, c)

    def _edits(self, changes: Sequence[tuple[int, int, int, int]]) -> list[TextEdit]:
        found, last = [], self._place.last_edit
        for a, b, c, d in changes:
            old, new = self._old[self._at + a : self._at + b], self._new[c:d]
            if old != new and not (last is not None and last.is_undone_by(old, new)):
                found.append(self._edit(self._place.window.start + self._at + a, len(old), new))
        return found

    def _edit(self, line: int, count: int, new: Sequence[str]) -> TextEdit:
        """The smallest edit that replaces ``count`` lines from ``line`` on by ``new``."""
        place, ends = self._place, self._place.line_end(line)
        if line + count < len(place.lines):
            start, end = place.starts[line], place.starts[line + count]
            text = "".join(each + ends for each in new)
        else:  # the file's last line has no line break; it is never deleted without a replacement
            end = len(place.text)
            start = place.starts[line] if count else end
            text = ("" if count else ends) + ends.join(new)
        old = place.text[start:end]
        head = common_length(old, text)
        tail = common_length(old[head:][::-1], text[head:][::-1])
        start, end = (place.unit.units_of(place.text[:at]) for at in (start + head, end - tail))
        return TextEdit(start, end, text[head : len(text) - tail])
