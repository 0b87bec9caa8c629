"""A sequence's text in another model's tokens, kept up to date as the target's tokens come."""

from __future__ import annotations

import codecs
from collections.abc import Sequence as Seq

from draft.reading_order import ReadingOrder
from draft.vocabulary_bridge import VocabularyBridge
from specdec.models.tokenizer import Tokenizer

SETTLED = 8  # tokens from the end that text to come may still change
LONGEST_TAIL = 32


class RetoldText:
    """``ids`` are the draft's tokens of everything said so far. Text is encoded anew from a little before its end, so
    a token cut in two by a boundary of the other vocabulary mends itself; ``settled`` leading ids never change.

    Special tokens keep their meaning where the draft knows one of that name, else they are left out. A
    fill-in-the-middle prompt is told in reading order, suffix first and prefix last: the draft just continues. A
    character of which only some bytes have come waits; ``whole`` tells whether none does.

    ``reads``: of a longer prompt only the last tokens are told, at least ``reads`` of them and less than twice as
    many; the cut moves in steps, so that the next keystroke finds the same beginning. 0: all of it.
    """

    def __init__(
        self, target: Tokenizer, draft: Tokenizer, bridge: VocabularyBridge, prompt: Seq[int], reads: int = 0
    ) -> None:
        self._target, self._draft, self._bridge = target, draft, bridge
        self.ids: list[int] = [draft.bos_id] if draft.bos_id is not None and draft.add_bos else []
        self.settled = len(self.ids)
        self._tail = ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        parts = ReadingOrder(target).parts(prompt)
        told = parts.head + parts.suffix + parts.prefix + parts.middle
        # The target's own begin token would be said twice where both call it by the same name.
        begin = len(self.ids)
        self.extend(told[1:] if self.ids and told and bridge.to_draft[told[0]] == self.ids[0] else told)
        cut = (self.settled - begin) // reads * reads - reads if reads else 0
        if cut > 0:
            del self.ids[begin : begin + cut]
            self.settled -= cut

    @property
    def whole(self) -> bool:
        """Whether the text ends with a whole character."""
        return not self._utf8.getstate()[0]

    def extend(self, tokens: Seq[int]) -> int:
        """More of the target's tokens; returns how many leading ids stayed as they were."""
        kept = len(self.ids)
        pieces: list[bytes] = []
        for token in tokens:
            if token in self._target.special_ids:
                kept = min(kept, self._say(b"".join(pieces), final=True))
                pieces.clear()
                self._settle(0)
                twin = self._bridge.to_draft[token]
                if twin >= 0:
                    self.ids.append(twin)
                    self.settled = len(self.ids)
            else:
                pieces.append(self._target.token_bytes(token))
        return min(kept, self._say(b"".join(pieces)))

    def _say(self, data: bytes, final: bool = False) -> int:
        """``final``: a character that has only begun will not be completed."""
        text = self._utf8.decode(data, final)
        if not text:
            return len(self.ids)
        self._tail += text
        before, fresh = self.ids[self.settled :], self._draft.encode(self._tail, add_special=False)
        same = 0
        for one, other in zip(before, fresh, strict=False):
            if one != other:
                break
            same += 1
        self.ids[self.settled :] = fresh
        kept = self.settled + same
        if len(fresh) > LONGEST_TAIL:
            self._settle(SETTLED)
        return kept

    def _settle(self, keep: int) -> None:
        """Only the last ``keep`` ids, and the text they stand for, remain open."""
        settled = max(self.settled, len(self.ids) - keep)
        # A character spread over several tokens must not be torn: settle a little less then.
        while settled > self.settled:
            try:
                self._tail = b"".join(self._draft.token_bytes(t) for t in self.ids[settled:]).decode()
                break
            except UnicodeDecodeError:
                settled -= 1
        self.settled = settled
