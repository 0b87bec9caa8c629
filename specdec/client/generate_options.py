"""What may be said about a generation, beside its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from specdec.types import GrammarParams, OutputParams, SamplingParams, SpeculationParams, StoppingParams


class GenerateOptions(TypedDict, total=False):
    """As the fields of `specdec.types.Request`; what is left out is as there.

    ``prediction``: text or token ids. ``supersedes_key``: ends the running request with the same one. ``timeout_s``:
    the call's deadline, over all its tries.
    """

    request_id: str
    model: str
    sampling: SamplingParams
    stopping: StoppingParams
    output: OutputParams
    speculation: SpeculationParams
    grammar: GrammarParams | None
    prediction: str | Sequence[int]
    session: str
    cache_salt: str
    priority: int
    target_tpot_ms: float | None
    supersedes_key: str
    timeout_s: float | None
