"""Training texts: their files, the held-out prompts, and prompts from given files."""

from __future__ import annotations

import itertools
import json
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from server.frame_files import FrameFiles, NumberedWriter
from specdec.core.fields import encodable
from specdec.errors import InvalidRequestError, ModelError, SpecdecError
from specdec.models.tokenizer import Tokenizer

TEXT_TOKENS = 512  # of a text, at most: prompt and answer
PROMPT_TOKENS = 256  # of a prompt, at most
OWN = "own"  # origin of prompts that the target wrote
GRAM = 10  # tokens in a row that a training text must not share with a held-out prompt


class TrainingError(SpecdecError):
    """The training cannot run or go on; the message names the option and the way out."""


class Prompt(NamedTuple):
    """What the target answers or continues."""

    ids: tuple[int, ...]
    lead: int  # tokens of the chat template before the content
    origin: str  # `OWN`, or the name of the given file


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the target's answer."""

    tokens: NDArray[np.int32]
    lead: int  # tokens of the chat template before the prompt's content
    answer: int  # index of the answer's first token
    greedy: bool  # the answer has the likeliest tokens
    origin: str  # as in `Prompt`

    @property
    def content(self) -> list[int]:
        """The tokens after the lead."""
        found: list[int] = self.tokens[self.lead :].tolist()
        return found


ROOM = "free some space or choose another folder, and run again"


@contextmanager
def writing(option: str, place: Path) -> Iterator[None]:
    """Raises TrainingError, which names ``option`` and ``place``, if the block cannot write there."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have errors of their own
        raise TrainingError(f"{option}: {place} cannot be written ({error}); {ROOM}") from None


_FILES = FrameFiles("texts-", ".bin", digits=5, magic=b"SDTEXT\x00\x01")
_FILE_BYTES = 16 << 20  # of a file, before the next begins


class TextStore:
    """A folder of append-only files. Every text is complete on disk when `append` returns; torn ones are not read.

    weights: digits that identify the target's weights (the first part of its numeric fingerprint).

    Raises:
        TrainingError: the folder holds the texts of another target, or cannot be written.
    """

    def __init__(self, folder: Path, weights: str) -> None:
        self.folder, self._weights = folder, weights
        with writing("--data", folder):
            self._writer = NumberedWriter(folder, _FILES, sync=True)

    def read(self) -> Iterator[Text]:
        """All texts, in the order in which they were written."""
        for path in _FILES.paths(self.folder):
            data = path.read_bytes()
            if _FILES.magic.startswith(data):  # a kill before the first text
                continue
            if not data.startswith(_FILES.magic):
                raise TrainingError(f"--data: {path} is no file of texts; choose another folder")
            values = (value for value, _ in _FILES.values(data))
            head = next(values, None)
            if head is not None and head["weights"] != self._weights:
                raise TrainingError(
                    f"--data: {self.folder} holds the texts of another target; give that --target, or another folder"
                )
            for value in values:
                tokens = np.frombuffer(value.pop("tokens"), np.int32)
                yield Text(tokens=tokens, **value)

    def append(self, text: Text) -> None:
        """Write one text. Raises TrainingError if the disk is full; the file is then unchanged."""
        value = {"tokens": text.tokens.tobytes(), "lead": text.lead, "answer": text.answer, "greedy": text.greedy}
        with writing("--data", self.folder):
            if self._writer.path is None or self._writer.size > _FILE_BYTES:
                self._writer.begin_file(_FILES.frame({"weights": self._weights}))
            self._writer.append(_FILES.frame({**value, "origin": text.origin}))

    def close(self) -> None:
        """Close the open file. Raises OSError if the disk fails."""
        self._writer.close()


class HeldOut:
    """Runs of `GRAM` tokens in the prompts that decide the figures. A shorter prompt counts as one run."""

    def __init__(self, prompts: Iterable[Seq[int]]) -> None:
        self._grams = {gram for prompt in prompts for gram in _grams(prompt)}

    def overlaps(self, tokens: Seq[int]) -> bool:
        """Whether ``tokens`` share a run with a held-out prompt."""
        return not self._grams.isdisjoint(_grams(tokens))


def _grams(tokens: Seq[int]) -> Iterator[tuple[int, ...]]:
    shifted = [itertools.islice(tokens, start, None) for start in range(min(GRAM, len(tokens)))]
    return zip(*shifted, strict=False)


HELD_OUT_SHARE = 10  # one of so many own texts is held out
HELD_OUT_TEXTS = 64  # own texts held out, at most


@dataclass(frozen=True, slots=True)
class TextSplit:
    """Texts to train on and texts to measure on, with no run of `GRAM` tokens of a held-out prompt in the former."""

    training: list[Text]
    held_out: list[Text]  # greedy answers to the target's own prompts
    n_dropped: int  # texts that share a run with a held-out prompt

    @staticmethod
    def of(texts: Iterable[Text], benchmarks: Iterable[Seq[int]]) -> TextSplit:
        """Split ``texts``, the same ones in every call. benchmarks: tokens of further held-out prompts."""
        rest: list[Text] = []
        chosen: list[Text] = []
        for text in texts:
            lot = zlib.crc32(text.tokens.tobytes()) % HELD_OUT_SHARE == 0
            mine = text.origin == OWN and text.greedy and lot and len(chosen) < HELD_OUT_TEXTS
            (chosen if mine else rest).append(text)
        own = (text.content[: text.answer - text.lead] for text in chosen)
        held_out = HeldOut(itertools.chain(benchmarks, own))
        training = [text for text in rest if not held_out.overlaps(text.content)]
        return TextSplit(training, chosen, len(rest) - len(training))

    def token_counts(self, vocab_size: int) -> NDArray[np.int64]:
        """How often each token occurs in the training texts' answers, [vocab_size]."""
        answers = np.concatenate([text.tokens[text.answer :] for text in self.training])
        return np.bincount(answers, minlength=vocab_size)


_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")
_PLAIN_PROMPTS = (160, 48, 96, 224, 128)  # tokens of a piece of plain text that the target continues, in turn
_PLAIN_STRIDE = 448  # tokens from one piece's begin to the next's
_ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names


def given_files(paths: Iterable[Path]) -> list[Path]:
    """The text files among ``paths`` and in their folders, by `_SUFFIXES`, in a mixed order that is always the same.

    Raises:
        TrainingError: there is none.
    """
    found: list[Path] = []
    for path in paths:
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        found += [file for file in inside if file.suffix in _SUFFIXES and file.is_file()]
    random.Random(0).shuffle(found)  # no package or chapter comes first
    if not found:
        raise TrainingError(f"--texts: no {', '.join(_SUFFIXES)} file there; give files or folders that hold some")
    return found


def given_prompts(files: Iterable[Path], tokenizer: Tokenizer, note: Callable[[str], None]) -> Iterator[Prompt]:
    """Prompts from ``files``: pieces of plain text to continue, and the user's turns of conversations in .jsonl.

    note: receives a line on each file that cannot be read, in whole or in part.

    A line of .jsonl has ``messages``, ``conversations`` (ShareGPT), or one of ``prompt``, ``instruction``, ``text``.
    """
    for file in files:
        try:
            if file.suffix == ".jsonl":
                unused = 0
                with file.open("rb") as lines:
                    for line in lines:
                        try:
                            turns = _turns(json.loads(line))
                        except (ValueError, RecursionError):
                            turns = []
                        if not all(encodable(text) for turn in turns for text in turn.values()):
                            turns = []
                        if (prompt := _turn_prompt(turns, tokenizer, file.name)) is not None:
                            yield prompt
                        else:
                            unused += bool(line.strip())
                if unused:
                    note(
                        f"--texts: {unused} lines of {file} are left out: they are not JSON in UTF-8 with a `prompt`, "
                        "`instruction` or `text`, or `messages` or `conversations` of strings; or they have no user's "
                        f"turn, more than {PROMPT_TOKENS} tokens, or turns that the model's chat template does not take"
                    )
            else:
                yield from _pieces(file.read_text(encoding="utf-8"), tokenizer, file.name)
        except UnicodeDecodeError:
            note(f"--texts: {file} is left out: it is not UTF-8; convert it")
        except OSError as error:
            note(f"--texts: {file} is left out: {error}")


def _pieces(text: str, tokenizer: Tokenizer, origin: str) -> Iterator[Prompt]:
    ids = tokenizer.encode(text, add_special=False)
    begin = (tokenizer.bos_id,) if tokenizer.add_bos and tokenizer.bos_id is not None else ()
    for number, start in enumerate(range(0, len(ids), _PLAIN_STRIDE)):
        piece = ids[start : start + _PLAIN_PROMPTS[number % len(_PLAIN_PROMPTS)]]
        if len(piece) >= GRAM:
            yield Prompt((*begin, *piece), len(begin), origin)


def _turn_prompt(turns: Seq[dict[str, str]], tokenizer: Tokenizer, origin: str) -> Prompt | None:
    last = max((at for at, turn in enumerate(turns) if turn["role"] == "user"), default=-1)
    begins = [begin for begin in (turns[: last + 1], turns[:1]) if begin and begin[-1]["role"] == "user"]
    return next(filter(None, (chat_prompt(begin, tokenizer, origin) for begin in begins)), None)


def _turns(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, dict):
        return []
    given = value.get("messages") or value.get("conversations")
    if isinstance(given, list) and all(isinstance(turn, dict) for turn in given):
        roles = [turn.get("role") or turn.get("from") for turn in given]
        texts = [turn.get("content") or turn.get("value") for turn in given]
        if all(isinstance(text, str) for text in texts) and all(isinstance(role, str) for role in roles):
            return [{"role": _ROLES.get(r, r), "content": t} for r, t in zip(roles, texts, strict=True)]
    texts = [text for name in ("prompt", "instruction", "text") if isinstance(text := value.get(name), str)]
    return [{"role": "user", "content": texts[0]}] if texts else []


def chat_prompt(messages: Seq[dict[str, str]], tokenizer: Tokenizer, origin: str) -> Prompt | None:
    """The conversation ``messages``, which ends with the user's turn, as a prompt; None if it is too long, or the model
    has no template that takes it."""
    try:
        ids = tokenizer.encode_chat(messages)
    except (InvalidRequestError, ModelError):  # such as roles that the template does not take in this order
        return None
    lead = chat_lead(tokenizer)
    if lead is None or len(ids) > PROMPT_TOKENS:
        return None
    return Prompt(tuple(ids), len(lead) if messages[0]["role"] == "user" else 0, origin)


def chat_lead(tokenizer: Tokenizer) -> list[int] | None:
    """The chat template's tokens before a first user turn's content, where a model can write that turn itself; None if
    the template leaves the user's text out.

    Raises:
        ModelError: the model has no chat template.
    """
    mark = "\ue000"
    text, found, _ = tokenizer.render_chat([{"role": "user", "content": mark}]).partition(mark)
    if not found:
        return None
    ids = tokenizer.encode(text, add_special=False, parse_special=True)
    lead = [] if tokenizer.bos_id is None or not tokenizer.add_bos else [tokenizer.bos_id]
    return ids if ids[: len(lead)] == lead else [*lead, *ids]
