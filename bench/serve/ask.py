"""One prompt as a client has it: before any tokenizer."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from specdec.client import ChatTurn, Fim
from specdec.types import SamplingParams


@dataclass(frozen=True, slots=True)
class Ask:
    """Exactly one of ``text``, ``ids`` (the target's tokens), ``chat`` and ``gap`` is given. ``prediction``: text the
    answer is expected to be like, ``session``: who asks, "" for nobody in particular. ``salt``: caches and draft texts
    are shared only with an equal one, by servers that know of it. ``fixed``: the answer has ``max_tokens`` tokens,
    wherever the model would end it. ``sampling`` None: at the endpoint's temperature; ``seed`` None: the server's.
    """

    name: str
    max_tokens: int
    text: str = ""
    chat: tuple[ChatTurn, ...] = ()
    gap: Fim | None = None
    stop: tuple[str, ...] = ()
    prediction: str = ""
    session: str = ""
    salt: str = ""
    fixed: bool = False
    ids: tuple[int, ...] = ()
    seed: int | None = None
    sampling: SamplingParams | None = None

    def of_fixed_length(self) -> Ask:
        """The same, and every answer as long as the other."""
        return dataclasses.replace(self, stop=(), fixed=True)
