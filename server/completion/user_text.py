"""Encodes what users wrote: never as special tokens, and the same texts only once."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from itertools import pairwise

from server.tokenizer_protocol import TokenizerLike

CACHED_CHARACTERS = 1 << 21
ENTRY = 64  # characters that an entry weighs besides its text: many short texts are mostly entries
_PROBE = "a)\n    b"


class UserText:
    """``reserved``: ids that a text must never become, beside the tokenizer's special ones, with their names. Safe to
    use from several threads.

    ``breaks_before``: a text is best parted in front of its line breaks; else behind them. Which of the two leaves the
    tokens as they are depends on how the vocabulary splits words. ``digits_alone``: it has no tokens of two digits.
    """

    def __init__(
        self, tokenizer: TokenizerLike, reserved: Mapping[int, str], capacity: int = CACHED_CHARACTERS
    ) -> None:
        self._tokenizer = tokenizer
        self._reserved = frozenset(reserved) | tokenizer.special_ids
        names = "|".join(re.escape(name) for name in sorted(reserved.values()))
        self._name_starts = re.compile(f"(?=(?:{names}))" if names else r"(?!)")
        self._capacity, self._held = capacity, 0
        self._known: OrderedDict[tuple[str, str, bool], tuple[int, ...]] = OrderedDict()
        self._lock = threading.Lock()
        self._adds_space = self._text_of(self._plain("a")) == b" a"
        whole, behind, before = (self._parted(at) for at in (0, 3, 2))
        self.breaks_before = behind != whole == before
        self.digits_alone = len(self._encode("1234567", False)) == 7

    @property
    def begin(self) -> tuple[int, ...]:
        """What every prompt begins with: the begin token, where the model wants one."""
        return tuple(self._tokenizer.encode("", add_special=True))

    def encode(self, text: str, owner: str = "", *, begins: bool = False) -> tuple[int, ...]:
        """Ids of ``text``, as it goes on in the middle of another; ``begins``: as a text of its own, which some
        vocabularies put a space in front of. What is remembered is kept apart by ``owner``."""
        key = (owner, text, begins and self._adds_space)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
        ids = tuple(self._encode(text, begins))
        with self._lock:
            if key not in self._known and len(text) <= self._capacity // 8:
                self._known[key] = ids
                self._held += len(text) + ENTRY
                while self._held > self._capacity:
                    (_, dropped, _), _ = self._known.popitem(last=False)
                    self._held -= len(dropped) + ENTRY
        return ids

    def knows(self, text: str, owner: str = "") -> bool:
        """Whether `encode` would answer without encoding."""
        return (owner, text, False) in self._known

    def line_end(self, ids: tuple[int, ...], low: int, high: int) -> int:
        """The largest count in ``low``..``high`` of leading ids that end a line, or ``high`` where none does."""
        for count in range(high, max(low, 1) - 1, -1):
            if b"\n" in self._tokenizer.token_bytes(ids[count - 1]):
                return count
        return high

    def _parted(self, at: int) -> list[int]:
        """Ids of a sample of code that is encoded in two parts."""
        return self._encode(_PROBE[:at], False) + self._encode(_PROBE[at:], False)

    def _encode(self, text: str, begins: bool) -> list[int]:
        if begins or not self._adds_space:
            return self._plain(text)
        # Behind a line break no space is added; the line break and its own space are taken off again.
        ids = self._plain("\n" + text)
        for count in range(1, len(ids) + 1):
            if self._text_of(ids[:count]) in (b" \n", b"\n"):
                return ids[count:]
        return self._plain(text)

    def _plain(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text, add_special=False)
        found = self._reserved.intersection(ids)
        if not found:
            return ids
        # The tokenizer takes them for ordinary ones, though a prompt gives them a meaning: their names are parted.
        cuts = [0, *(match.start() + 1 for match in self._name_starts.finditer(text)), len(text)]
        pieces = [text[a:b] for a, b in pairwise(cuts)]
        parted = [i for piece in pieces for i in self._tokenizer.encode(piece, add_special=False)]
        return [i for i in parted if i not in self._reserved]

    def _text_of(self, ids: Iterable[int]) -> bytes:
        return b"".join(map(self._tokenizer.token_bytes, ids))
