"""The parts of an engine, and what a swap of its draft model replaces: drafters, controller, trace, estimates."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from draft.manager import STALL_MS, DrafterManager
from draft.protocol import Drafter, ModelBasedDrafter
from specdec.config import EngineConfig, WeightDtype
from specdec.control.controller import Controller
from specdec.control.estimates.costs import CostTable
from specdec.control.estimates.learned import Learned
from specdec.control.learning import Estimates
from specdec.control.params import DEFAULT_PARAMS, ControlParams
from specdec.control.trace import TRACE_STEPS, TraceLog, TraceWriter
from specdec.core.kv_cache import KvCacheManager
from specdec.core.sampling import Sampler
from specdec.core.types import DRAFT_MODELS, MAX_QUEUED_REQUESTS, EngineInfo
from specdec.engine.disk_cache import DiskCache
from specdec.engine.profile_cache import LearnedProfile
from specdec.engine.profile_costs import StepCosts
from specdec.engine.propose import Drafting
from specdec.engine.verify import StepVerifier
from specdec.errors import ConfigError
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


class Speculation:
    """Everything that a swap of the draft model replaces.

    costs: measured at start.

    Raises:
        ConfigError: the trace file cannot be written.
    """

    def __init__(self, parts: EngineParts, costs: StepCosts) -> None:
        self._parts, self._config = replace(parts, drafters=()), parts.config.speculation
        began_s = parts.clock()
        controller = self._new_controller(parts.drafters, costs, parts.learned)
        self.trace = TraceLog(parts.trace_steps, self._trace_writer(controller), began_s)
        self._assemble(parts.drafters, controller)

    def swap(self, draft: LoadedDraft | None) -> None:
        """Replace the draft model or the feature head, whichever ``draft`` is; None: remove the draft model. Other
        drafters keep their costs and estimates.

        Raises:
            ConfigError: the next trace file cannot be written; nothing has changed.
        """
        replaced = DRAFT_MODELS if draft is None or draft[1].name in DRAFT_MODELS else (draft[1].name,)
        drafters = [drafter for drafter in self.drafters if drafter.name not in replaced]
        if draft is not None:
            drafters.append(draft[1])
        tables = self.controller.as_dict()
        drafting = {name: table for name, table in tables["drafting"].items() if name not in replaced}
        self._save()
        learned = {name: found for name, found in self.controller.estimates.learned().items() if name not in replaced}
        if self._parts.learned_file is not None:
            learned = self._parts.learned_file.read(drafters) | learned
        controller = self._new_controller(drafters, StepCosts(tables["verify"], drafting), learned)
        if (writer := self._trace_writer(controller)) is not None:
            self.trace.replace_writer(writer)
        self._assemble(drafters, controller)

    def check_swap(self) -> None:
        """Raise ConfigError if the engine cannot swap its draft model."""
        if not self._config.enabled or self._parts.load_draft is None:
            raise ConfigError("engine.speculation.enabled: this engine was started without speculation; start it with")

    def close(self) -> None:
        """Close the trace file and write the estimates."""
        self.trace.close()
        self._save()

    def _save(self) -> None:
        if self._parts.learned_file is not None:
            self._parts.learned_file.write(self.drafters, self.controller.estimates.learned())

    def _new_controller(self, drafters: Seq[Drafter], costs: StepCosts, learned: Mapping[str, Learned]) -> Controller:
        params, guess = self._parts.control_params, CostTable.guess(self._parts.config.max_step_rows, 1.0).as_dict()
        model_based = {drafter.name: drafter.model_based for drafter in drafters}
        drafting = [
            (name, costs.drafting.get(name, guess)) for name, runs_a_model in model_based.items() if runs_a_model
        ]
        levels = {name: CostTable.from_dict(table, params) for name, table in drafting}
        verify = CostTable.from_dict(costs.verify, params)
        tree_rows = {drafter.name: drafter.tree_rows for drafter in drafters if drafter.tree_rows}
        return Controller(Estimates(model_based, verify, levels, learned, params, tree_rows))

    def _trace_writer(self, controller: Controller) -> TraceWriter | None:
        """The writer of the configured trace file. Its header holds ``controller``, so a swap begins another file."""
        file = self._config.trace_file
        return None if file is None else TraceWriter(file, controller.as_dict())

    def _assemble(self, drafters: Seq[Drafter], controller: Controller) -> None:
        self.drafters, self.controller = list(drafters), controller
        cells = controller.estimates.calibration.size
        self.manager = DrafterManager(drafters, self._parts.info.vocab_size, STALL_MS, cells=cells)
        self.drafting = self._parts.drafting(self.manager, controller)
