"""The parts of a fill-in-the-middle prompt, which models are given in another order than people read."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from specdec.models.tokenizer import Tokenizer

FIM_MARKS = (  # before the prefix, before the suffix, before the middle
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<PRE>", "<SUF>", "<MID>"),
)


@dataclass(frozen=True, slots=True)
class Parts:
    """head: what stands before the document, prefix: of it before the cursor, suffix: behind the cursor, middle: what
    is written already. Any other text is all prefix."""

    head: list[int]
    prefix: list[int]
    suffix: list[int]
    middle: list[int]


class ReadingOrder:
    """Knows the marks of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._marks: list[tuple[int, int, int]] = []
        for names in FIM_MARKS:
            prefix, suffix, middle = (tokenizer.token_id(name) for name in names)
            if prefix is not None and suffix is not None and middle is not None:
                self._marks.append((prefix, suffix, middle))

    def parts(self, prompt: Seq[int]) -> Parts:
        """Takes prompts in prefix-suffix-middle and in suffix-prefix-middle order apart; the marks are left out."""
        ids = list(prompt)
        for marks in self._marks:
            prefix, suffix, middle = (ids.index(mark) if mark in ids else -1 for mark in marks)
            if 0 <= prefix < suffix < middle:
                return Parts(ids[:prefix], ids[prefix + 1 : suffix], ids[suffix + 1 : middle], ids[middle + 1 :])
            if 0 <= suffix < prefix < middle:
                return Parts(ids[:suffix], ids[prefix + 1 : middle], ids[suffix + 1 : prefix], ids[middle + 1 :])
        return Parts([], ids, [], [])
