"""Real next edits: from two releases of packages, a change in a file and the changes that precede it there."""

from __future__ import annotations

import difflib
import hashlib
import re
import zipfile
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import NamedTuple

from bench.workloads.workload import WorkloadUnavailableError
from server.completion.documents import TextEdit
from server.completion.next_edit import EditPlace, EditPrompt, RecentEdit
from server.completion.prompt_packer import PromptPacker
from specdec.config import EngineConfig
from specdec.core.types import Request
from specdec.errors import ModelError
from specdec.load.request import LoadRequest
from specdec.models.fetch import download_wheel
from specdec.models.next_edit import FORMS
from specdec.models.tokenizer import Tokenizer


class Release(NamedTuple):
    """A pure-Python wheel on the package index."""

    name: str
    version: str
    sha256: str


# Two releases of each package, all under MIT or BSD licences. Of each pair, the changes repeat a pattern.
RELEASES = (
    (
        Release("pluggy", "1.2.0", "c2fd55a7d7a3863cba1a013e4e2414658b1d07b6bc57b3919e0c63c9abb99849"),
        Release("pluggy", "1.3.0", "d89c696a773f8bd377d18e5ecda92b7a3793cbe66c87060a6fb58c7b6e1061f7"),
    ),
    (
        Release("attrs", "23.1.0", "1f28b4522cdc2fb4256ac1a020c78acf9cba2c6b461ccd2c126f3aa8e8335d04"),
        Release("attrs", "23.2.0", "99b87a485a5820b23b879f04c2305b44b951b502fd64be915879d77a7e8fc6f1"),
    ),
    (
        Release("httpx", "0.24.1", "06781eb9ac53cde990577af654bd990a4949de37a28bdb4a230d434f3a30b9bd"),
        Release("httpx", "0.25.0", "181ea7f8ba3a82578be86ef4171554dd45fec26a02556a744db029a0a27b7100"),
    ),
    (
        Release("click", "8.1.3", "bb4d8133cb15a609f44e8213d9b391b0809795062913b383c62be0ee95b1db48"),
        Release("click", "8.1.4", "2739815aaa5d2c986a88f1e9230c55e17f0caad3d958a5e13ad0797c166db9e3"),
    ),
    (
        Release("flask", "2.2.5", "58107ed83443e86067e41eff4631b058178191a355886f8e479e347fa1285fdf"),
        Release("flask", "2.3.0", "99a4889167c86fe57c4036825ebc77dc5dc3241bf0d80ea80ca941587d0d6a52"),
    ),
    (
        Release("werkzeug", "2.3.7", "effc12dba7f3bd72e605ce49807bbe692bd729c3bb122a3b91747a6ae77df528"),
        Release("werkzeug", "3.0.0", "cbb2600f7eabe51dbc0502f58be0b3e1b96b893b05695ea2b35b43d4de2d9962"),
    ),
)
PER_PACKAGE = 5  # edits, spread evenly over the package's files
RECENT = 3  # earlier changes that are shown
MOST_LINES = 6  # of a change, before and after it
CONTEXT = 1  # changes with at most twice as many unchanged lines between them are one
CLEAR = 10  # unchanged lines on each side of the predicted change, so that its window holds no other
HEAD_LINES = 2  # of the window, given as the start of an answer
_WORD = re.compile(r"[A-Za-z_]\w{2,}")


@dataclass(frozen=True, slots=True)
class NextEdit:
    """A file before a change that its author made after the `RECENT` ones before it."""

    name: str
    place: EditPlace
    """The file with the earlier changes; the cursor is where the next change begins."""
    after: str
    """The file after the next change."""

    def window_after(self, text: str) -> list[str]:
        """The lines in ``text``, a later version of the file, of the window that the model rewrites."""
        lines, window = text.split("\n"), self.place.window
        return lines[window.start : len(lines) - (len(self.place.lines) - window.stop)]

    def lines_right(self, text: str) -> float:
        """Share of the window's lines that are in ``text`` as the author left them."""
        found, wanted = self.window_after(text), self.window_after(self.after)
        blocks = difflib.SequenceMatcher(None, found, wanted, autojunk=False).get_matching_blocks()
        return sum(block.size for block in blocks) / max(len(found), len(wanted))


def apply_edits(text: str, edits: Seq[TextEdit]) -> str:
    """``text`` after ``edits``, which are in order and count code points."""
    for edit in reversed(edits):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def workload_folder() -> Path:
    """Where fetched packages are kept."""
    return EngineConfig().cache_dir / "workloads"


def next_edits(folder: Path, releases: Seq[tuple[Release, Release]] = RELEASES) -> list[NextEdit]:
    """`PER_PACKAGE` edits of each package, the packages in turn. Fetches into ``folder`` what is missing there.

    Raises:
        WorkloadUnavailableError: the index cannot be reached, or has other files than expected.
    """
    by_package = [
        _spread(list(_edits_between(*(_modules(_fetched(one, folder)) for one in pair)))) for pair in releases
    ]
    return [edit for edit in chain(*zip_longest(*by_package)) if edit is not None]


def _spread(edits: list[NextEdit]) -> list[NextEdit]:
    count = min(PER_PACKAGE, len(edits))
    return [edits[i * len(edits) // count] for i in range(count)]


def _fetched(release: Release, folder: Path) -> Path:
    home = folder / f"{release.name}-{release.version}"
    found = next(home.glob("*.whl"), None)
    if found is None:
        home.mkdir(parents=True, exist_ok=True)
        try:
            found = download_wheel(f"{release.name}=={release.version}", home, lambda count: None)
        except ModelError as error:
            raise WorkloadUnavailableError(str(error)) from None
    if hashlib.sha256(found.read_bytes()).hexdigest() != release.sha256:
        raise WorkloadUnavailableError(f"{found} has another SHA-256 than the workload expects; delete it")
    return found


def _modules(wheel: Path) -> dict[str, list[str]]:
    """The lines of each Python file, by its name."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in sorted(archive.namelist()) if name.endswith(".py")]
        return {name: archive.read(name).decode().split("\n") for name in names}


class _Hunk(NamedTuple):
    """Lines [a, b) of the old file became lines [c, d) of the new one."""

    a: int
    b: int
    c: int
    d: int


def _edits_between(old: dict[str, list[str]], new: dict[str, list[str]]) -> Iterator[NextEdit]:
    for path in sorted(old.keys() & new.keys()):
        before, after = old[path], new[path]
        hunks = _hunks(before, after)
        for number in range(1, len(hunks)):
            if _follows(before, after, hunks, number):
                yield _edit(path, before, after, hunks, number)


def _hunks(before: list[str], after: list[str]) -> list[_Hunk]:
    found: list[_Hunk] = []
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for group in matcher.get_grouped_opcodes(CONTEXT):
        changes = [opcode for opcode in group if opcode[0] != "equal"]
        (_, a, _, c, _), (_, _, b, _, d) = changes[0], changes[-1]
        found.append(_Hunk(a, b, c, d))
    return found


def _follows(before: list[str], after: list[str], hunks: list[_Hunk], number: int) -> bool:
    """Whether the change is short, stands alone, and removes or adds a word that a recent one removed or added."""
    hunk = hunks[number]
    following = hunks[number + 1].a if number + 1 < len(hunks) else len(before)
    alone = hunks[number - 1].b + CLEAR < hunk.a and hunk.b + CLEAR < following
    if max(hunk.b - hunk.a, hunk.d - hunk.c) > MOST_LINES or not alone:
        return False
    removed, added = _words(before, after, hunk)
    recent = [_words(before, after, other) for other in hunks[max(0, number - RECENT) : number]]
    return any(removed & gone or added & come for gone, come in recent)


def _words(before: list[str], after: list[str], hunk: _Hunk) -> tuple[set[str], set[str]]:
    """The words that a change removes, and those that it adds."""
    old = set(_WORD.findall("\n".join(before[hunk.a : hunk.b])))
    new = set(_WORD.findall("\n".join(after[hunk.c : hunk.d])))
    return old - new, new - old


def _edit(path: str, before: list[str], after: list[str], hunks: list[_Hunk], number: int) -> NextEdit:
    first = max(0, number - RECENT)
    texts = [_applied(before, after, hunks[:count]) for count in range(first, number + 2)]
    recent = tuple(RecentEdit.of(path, texts[i], texts[i + 1]) for i in range(number - first))
    text, line = texts[-2], hunks[number].c
    cursor = sum(len(each) + 1 for each in text.split("\n")[:line])
    return NextEdit(f"{path}:{line + 1}", EditPlace(path, text, cursor, recent), texts[-1])


def _applied(before: list[str], after: list[str], hunks: list[_Hunk]) -> str:
    """The old file with the first changes."""
    lines: list[str] = []
    at = 0
    for hunk in hunks:
        lines += before[at : hunk.a] + after[hunk.c : hunk.d]
        at = hunk.b
    return "\n".join(lines + before[at:])


class EditPrompts:
    """Prompts for one tokenizer, as a server makes them."""

    def __init__(self, tokenizer: Tokenizer, max_context: int = 4096) -> None:
        self._tokenizer, self._packer = tokenizer, PromptPacker(tokenizer, max_context)

    def prompt(self, edit: NextEdit, form: str = "") -> EditPrompt:
        """The prompt for an edit. form: the name of a `NextEditForm`; empty: the one that the vocabulary allows."""
        prompt = EditPrompt(edit.place, "", self._tokenizer, self._packer)
        prompt.form = next((each for each in FORMS if each.name == form), prompt.form)
        return prompt

    def ask(self, edit: NextEdit, form: str = "") -> LoadRequest:
        """The request with that prompt; its answer is as long as the window needs."""
        request = self.prompt(edit, form).request(Request(edit.name, ()))
        stopping = request.stopping
        assert stopping.max_tokens is not None  # it follows from the window's length
        return LoadRequest(
            edit.name, stopping.max_tokens, ids=request.prompt_ids, stop=stopping.stop,
            stop_ids=stopping.stop_token_ids, prediction=request.prediction_ids,
        )  # fmt: skip

    def head(self, edit: NextEdit, form: str) -> tuple[int, ...]:
        """The mark that begins an answer in that form, and `HEAD_LINES` of the window; empty: there is no mark. A model
        that is not trained on the form writes no window without them."""
        mark, place, encode = self.prompt(edit, form).form.answer_head, edit.place, self._tokenizer.encode
        if not mark:
            return ()
        lines = place.shown(place.window[:HEAD_LINES])
        return (*encode(mark, add_special=False, parse_special=True), *encode(lines, add_special=False))


def edit_prompts(tokenizer: Tokenizer, count: int, max_tokens: int | None = None) -> list[LoadRequest]:
    """``count`` prompts in the form that the vocabulary allows.

    Raises:
        WorkloadUnavailableError: as `next_edits`.
    """
    prompts = EditPrompts(tokenizer)
    asks = [prompts.ask(edit) for edit in next_edits(workload_folder())[:count]]
    return [replace(ask, max_tokens=max_tokens or ask.max_tokens) for ask in asks]
