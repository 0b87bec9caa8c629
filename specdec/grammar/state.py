"""The state of one sequence in its grammar, or in the word that its output spells again, after the committed tokens and
at every node of a tree."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from specdec.core.kv_cache import common_length
from specdec.core.sampling import token_mask
from specdec.models.tokenizer import Tokenizer

Mask = NDArray[np.uint32]
MAX_MESSAGE = 240
"""Characters of the library's message in a refusal."""


@lru_cache(maxsize=4)
def any_token(vocab_size: int) -> Mask:
    """The mask of all tokens, one for all sequences: a GPU gets each mask once a step."""
    return token_mask(np.arange(vocab_size), vocab_size)


def shortened(message: str) -> str:
    """A message of the library on one line."""
    flat = " ".join(message.replace("<non-verbose/>", "").split())
    return flat if len(flat) <= MAX_MESSAGE else flat[:MAX_MESSAGE] + "..."


class _Place(Enum):
    """Where a path ends."""

    INSIDE = "inside"
    OVER = "over"
    OUTSIDE = "outside"


class GrammarState:
    """The tokens that a grammar allows after the committed output and a path.

    origin: a compiled ``LLMatcher`` at the output's start; it is copied. One matcher walks the tree: it rolls back to
    where two paths part and advances from there. Masks are cached until the next commit.

    by_copies: a copy advances from the committed output instead. Needed by a grammar that names tokens (``<[5]>``,
    ``<|im_start|>``), over which the library rolls back by a wrong number of bytes, and by one with ``no_forcing``.

    - If the grammar forces the following text, the mask holds only the first token of the tokenizer's own split of that
      text: the spelling that the model was trained on, which can be drafted with certainty.
    - If the text is complete, an end token is allowed; if nothing can follow, only end tokens are.
    - After an end token (``ignore_eos``, ``min_tokens``) only end tokens follow, up to the output's length.
    - A path outside the grammar has an empty mask, so its nodes cannot be accepted.
    """

    def __init__(self, origin: Any, by_copies: bool, eos_ids: Iterable[int], vocab_size: int) -> None:
        self._origin, self._by_copies, self._vocab_size = origin, by_copies, vocab_size
        self._eos_ids = tuple(eos_ids)
        self._matcher = origin.deep_copy()
        self._base: list[int] = []  # committed tokens after those of the origin, up to the end token
        self._path: list[int] = []  # tokens that the matcher has consumed beyond them
        self._masked = 0  # tokens of the path that the matcher's last mask may depend on
        self._place = _Place.INSIDE  # of the committed tokens
        self._masks: dict[tuple[int, ...], Mask] = {}
        self._end = token_mask(self._eos_ids, vocab_size)
        self._nothing = np.zeros_like(self._end)
        self.error = ""
        """The complexity limit that the matcher last ran into, or empty. On the output's own path, the mask is empty
        then and the request fails with this error."""

    def mask(self, path: Sequence[int]) -> Mask:
        """The `token_mask` of allowed tokens after ``path``.

        Read-only. Never raises: an impossible path has an empty mask.
        """
        key = tuple(path)
        if key not in self._masks:
            self._masks[key] = self._mask(key)
        return self._masks[key]

    def commit(self, tokens: Iterable[int]) -> GrammarState:
        """Advance the base state by ``tokens``; returns itself."""
        self._place = self._walk(tuple(tokens))
        self._base += self._path
        if self._by_copies:
            self._origin = self._matcher.deep_copy()
            self._base.clear()
        self._path.clear()
        self._masked = 0
        self._masks.clear()
        return self

    def forced(self, path: Sequence[int], limit: int) -> list[int]:
        """At most ``limit`` tokens that the grammar forces after ``path``, end token included; often none.

        They are the tokenizer's split of the forced text. Of several end tokens it is the first.
        """
        chain: list[int] = []
        while len(chain) < limit:
            node = (*path, *chain)
            if self._walk(node) is not _Place.INSIDE:
                break
            following = self._matcher.compute_ff_tokens()
            following = following[: self._matcher.validate_tokens(following)] or self._only(self.mask(node))
            if not following:
                break
            chain += following
        return chain[:limit]

    def _mask(self, path: tuple[int, ...]) -> Mask:
        for _ in range(2):
            place = self._walk(path)
            if place is not _Place.INSIDE:
                return self._end if place is _Place.OVER else self._nothing
            words = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._end.size]  # it has a bit more
            self._masked = len(self._path)
            if not self._matcher.is_error():
                return words
            self._revive()
        return self._nothing

    def _only(self, mask: Mask) -> list[int]:
        """The only token of ``mask``, or the first end token if it holds only end tokens, else none."""
        words = np.flatnonzero(mask)
        if len(words) == 1 and int(mask[words[0]]).bit_count() == 1:
            return [int(words[0]) * 32 + int(mask[words[0]]).bit_length() - 1]
        return [self._eos_ids[0]] if len(words) and not (mask & ~self._end).any() else []

    def _walk(self, path: tuple[int, ...]) -> _Place:
        """Move the matcher along ``path`` as far as the grammar allows."""
        if self._place is not _Place.INSIDE:
            ends = self._place is _Place.OVER and all(token in self._eos_ids for token in path)
            return _Place.OVER if ends else _Place.OUTSIDE
        for _ in range(2):
            place = self._follow(path)
            if not self._matcher.is_error():
                return place
            self._revive()
        return _Place.OUTSIDE

    def _follow(self, path: tuple[int, ...]) -> _Place:
        shared = common_length(path, self._path)
        if shared < len(self._path):
            self._roll_back(shared)
        for at, token in enumerate(path[shared:], shared):
            if token in self._eos_ids and self._matcher.is_accepting():
                return _Place.OVER if all(after in self._eos_ids for after in path[at:]) else _Place.OUTSIDE
            if not 0 <= token < self._vocab_size or self._matcher.try_consume_tokens([token]) != 1:
                return _Place.OUTSIDE
            self._path.append(token)
        return _Place.INSIDE

    def _roll_back(self, length: int) -> None:
        """Cut the path to ``length`` tokens.

        The library keeps its last mask, and returns it on any path with as many lexemes and the lexer in the same
        state. So a mask of the part cut off is replaced by one of the last place where no text is forced: elsewhere the
        library keeps none.
        """
        matcher, masked, undone = self._matcher, self._masked > length, len(self._path) - length
        del self._path[length:]
        if not self._by_copies:
            matcher.rollback(undone)
            if not masked:
                return
            tokens = [*self._base, *self._path]
            for at in range(len(tokens), -1, -1):
                if not matcher.compute_ff_bytes():
                    matcher.compute_bitmask()
                    matcher.try_consume_tokens(tokens[at:])
                    self._masked = length
                    return
                matcher.rollback(min(at, 1))
        self._restart()

    def _revive(self) -> None:
        """Replace a matcher in its error state, which it never leaves; a draft may have led it there."""
        self.error = shortened(self._matcher.get_error()).replace("NoExtensionBias", "no token of the model may follow")
        self._path.clear()
        self._restart()

    def _restart(self) -> None:
        self._matcher = self._origin.deep_copy()
        self._matcher.try_consume_tokens([*self._base, *self._path])
        self._masked = 0


def healing_matcher(start: str, vocabulary: LLTokenizer) -> LLMatcher:
    """A matcher of texts that begin with ``start``. It takes 1 ms to build, and a `TokenHealing` copies it."""
    # With `no_forcing` any tokens may spell the text, not only the tokenizer's own
    lark = f'%llguidance {{"no_forcing": true}}\nstart: TEXT\nTEXT: {json.dumps(start)} /(?s:.*)/'
    return LLMatcher(vocabulary, LLMatcher.grammar_from_lark(lark), log_level=0)


class TokenHealing:
    """A `TokenGrammar` of the first tokens: they spell ``start``, and the last of them may extend beyond it.

    A prompt may end within what is one token with what follows: "ret" before "urn". Its tokens would be ones that the
    model never saw in such a place. So the prompt ends before that word, and the output spells it again.

    matcher: the `healing_matcher` of ``start``.
    """

    error = ""

    def __init__(self, start: str, matcher: LLMatcher, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._state, self._rest = GrammarState(matcher, True, (), vocab_size), start.encode()
        self._tokenizer, self._any = tokenizer, any_token(vocab_size)

    def mask(self, path: Sequence[int]) -> Mask:
        """Allowed tokens after ``path``; none after tokens that spell something else, all once the text is spelled."""
        return self._any if self._bytes_of(path).startswith(self._rest) else self._state.mask(path)

    def forced(self, path: Sequence[int], limit: int) -> Sequence[int]:
        """None: the text is a few tokens at most."""
        return ()

    def commit(self, tokens: Iterable[int]) -> TokenHealing | None:
        """Advance by ``tokens``; None: the text is spelled."""
        taken = tuple(tokens)
        self._rest = self._rest[len(self._bytes_of(taken)) :]
        if not self._rest:
            return None
        self._state.commit(taken)
        return self

    def _bytes_of(self, tokens: Iterable[int]) -> bytes:
        """The text of ``tokens``. A special token is no text; it has a byte that no text has."""
        special, bytes_of = self._tokenizer.special_ids, self._tokenizer.token_bytes
        return b"".join(b"\xff" if token in special else bytes_of(token) for token in tokens)
