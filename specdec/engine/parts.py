"""The parts that an engine is assembled from."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from draft.manager import DrafterManager
from draft.protocol import Drafter, ModelBasedDrafter
from specdec.config import EngineConfig, WeightDtype
from specdec.control.controller import Controller
from specdec.control.estimates.learned import Learned
from specdec.control.params import DEFAULT_PARAMS, ControlParams
from specdec.control.trace import TRACE_STEPS
from specdec.core.kv_cache import KvCacheManager
from specdec.core.sampling import Sampler
from specdec.core.types import MAX_QUEUED_REQUESTS, EngineInfo
from specdec.engine.disk_cache import DiskCache
from specdec.engine.profile_cache import LearnedProfile
from specdec.engine.profile_costs import StepCosts
from specdec.engine.propose import Drafting
from specdec.engine.verify import StepVerifier
from specdec.grammar.compiler import GrammarCompiler
from specdec.models.decoder import TargetDecoder
from specdec.models.tokenizer import Tokenizer

LoadedDraft = tuple[str, ModelBasedDrafter]
"""A draft model's name, and the drafter over it."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of an engine. `specdec.engine.build` makes them; tests replace some."""

    config: EngineConfig
    info: EngineInfo
    tokenizer: Tokenizer
    decoder: TargetDecoder
    sampler: Sampler
    kv: KvCacheManager
    drafters: Seq[Drafter] = field(default_factory=list)
    costs: StepCosts | None = None
    """None: the controller starts from a guess."""
    load_draft: Callable[[str, WeightDtype | None], LoadedDraft] | None = None
    """Loads another draft model; None: the engine cannot swap it."""
    verifier: StepVerifier | None = None
    """None: the CPU's, over `decoder` and `sampler`."""
    learned: Mapping[str, Learned] = field(default_factory=dict)
    """The controller's initial estimates by drafter."""
    learned_file: LearnedProfile | None = None
    """File for its estimates; None: they end with the engine."""
    control_params: ControlParams = DEFAULT_PARAMS
    clock: Callable[[], float] = time.monotonic
    """Returns monotonic seconds; a simulation has its own."""
    drafting: Callable[[DrafterManager, Controller], Drafting] = Drafting
    """Makes the propose stage; a simulation has its own."""
    grammars: GrammarCompiler | None = None
    """None: the engine makes its own."""
    disk: DiskCache | None = None
    """Copies `kv` to files; None: what leaves its memory is lost."""
    trace_steps: int = TRACE_STEPS
    """Steps that the decision trace keeps in memory; 0: none."""
    max_queued_requests: int = MAX_QUEUED_REQUESTS
    """Requests that may wait; further ones are refused."""
    trusts_requests: bool = False
    """True: requests have passed `check_requests` before they are submitted; `submit` does not repeat it."""
