"""One prompt as every engine gets it: token ids."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PeerPrompt:
    """The same ids go to all, so no tokenizer or chat template can differ. ``prediction`` (text the answer may be
    like) and ``session`` are for engines that know of them. ``fixed``: the answer has ``max_tokens`` tokens, wherever
    the model would end it; else it ends at ``stop``, ``stop_ids`` and the model's own end. One that is not ``counted``
    warms up."""

    workload: str
    name: str
    ids: tuple[int, ...]
    max_tokens: int
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    prediction: str = ""
    session: str = ""
    fixed: bool = False
    counted: bool = True
