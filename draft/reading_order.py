"""The parts of a fill-in-the-middle prompt, which models are given in another order than people read."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from specdec.models.fim import TEMPLATES
from specdec.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Parts:
    """head: what stands before the document, prefix: of it before the cursor, suffix: behind the cursor, middle: what
    is written already. Any other text is all prefix."""

    head: list[int]
    prefix: list[int]
    suffix: list[int]
    middle: list[int]


class ReadingOrder:
    """Knows the fill-in-the-middle tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._markers: list[tuple[int, int, int | None]] = []  # prefix, suffix, middle; None: the template has no such
        for template in TEMPLATES:
            prefix, suffix, middle = (
                next((found for name in names if (found := tokenizer.token_id(name)) is not None), None)
                for names in (template.prefix, template.suffix, template.middle)
            )
            if prefix is not None and suffix is not None and (middle is not None or not template.middle):
                self._markers.append((prefix, suffix, middle))

    def parts(self, prompt: Seq[int]) -> Parts:
        """Takes prompts in prefix-suffix-middle and in suffix-prefix-middle order apart; the markers are left out.
        Where a template has no token for the middle, what is written there continues the prefix."""
        ids = list(prompt)
        for *markers, last in self._markers:
            prefix, suffix = (ids.index(marker) if marker in ids else -1 for marker in markers)
            middle = len(ids) if last is None else ids.index(last) if last in ids else -1
            if last is not None and 0 <= prefix < suffix < middle:
                return Parts(ids[:prefix], ids[prefix + 1 : suffix], ids[suffix + 1 : middle], ids[middle + 1 :])
            if 0 <= suffix < prefix < middle:
                return Parts(ids[:suffix], ids[prefix + 1 : middle], ids[suffix + 1 : prefix], ids[middle + 1 :])
        return Parts([], ids, [], [])
