"""How a gap is turned into a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class CompletionHints:
    """None leaves a choice to the server. ``mode``: fill in or be refused where the model can not; else continue the
    prefix there; or continue it in any case. ``max_prompt_tokens``: at least 64. The others: whether the text ends
    where it leaves the gap's indentation, closes a bracket of its surroundings, or repeats what follows."""

    mode: Literal["middle", "middle_or_prefix", "prefix"] = "middle"
    max_prompt_tokens: int | None = None
    stop_at_dedent: bool | None = None
    stop_at_bracket: bool | None = None
    stop_at_suffix: bool | None = None
