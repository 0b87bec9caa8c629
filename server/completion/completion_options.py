"""How completions are to be made, whichever gap they are for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from server.completion.gap import FillMode
from specdec.types import GrammarParams, OutputParams, SamplingParams, SpeculationParams, StoppingParams

DEFAULT_MAX_TOKENS = 128


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """``max_prompt_tokens`` None: the packer's default. ``dedent``, ``bracket`` and ``suffix``: end where the text
    leaves its block, closes a bracket that is not its own, or repeats what follows; where ``stopping`` has such a rule
    already, that one counts. The rest is as in `specdec.types.Request`."""

    mode: FillMode = FillMode.MIDDLE
    max_prompt_tokens: int | None = None
    dedent: bool = True
    bracket: bool = True
    suffix: bool = True
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    stopping: StoppingParams = field(default_factory=lambda: StoppingParams(max_tokens=DEFAULT_MAX_TOKENS))
    output: OutputParams = field(default_factory=OutputParams)
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    priority: int = 0
    cache_salt: str = ""
    session: str = ""
    target_tpot_ms: float | None = None
    grammar: GrammarParams | None = None

    def of_session(self, session: str) -> CompletionOptions:
        """These, in a session."""
        return replace(self, session=session)

    @property
    def repeatable(self) -> bool:
        """Whether the same gap gets the same text each time."""
        return self.sampling.temperature == 0 or self.sampling.seed is not None
