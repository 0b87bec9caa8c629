"""Builds an engine from its configuration: kernels, weights, caches, drafters, first acceptance estimates."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from platform import machine
from typing import TYPE_CHECKING, Any

import torch

import specdec
from draft.cross_vocab import CrossVocabularyDrafter
from draft.grammar import GrammarDrafter
from draft.head import HeadDrafter, HeadNetwork
from draft.head_checkpoint import HeadModel, is_head, load_head
from draft.index import IndexDrafter, IndexShelf
from draft.lookups import load_lookups
from draft.model import TAIL_POOL, ModelDrafter
from draft.oracle import OracleDrafter
from draft.parallel import ParallelDrafter
from draft.prediction import PredictionDrafter
from draft.protocol import Drafter, ModelBasedDrafter
from draft.suffix import SuffixDrafter
from specdec.config import EngineConfig, WeightDtype
from specdec.control.estimates.learned import Learned
from specdec.control_groups import usable_cores
from specdec.core.kv_cache import KvCacheManager
from specdec.core.sampling import Sampler
from specdec.core.types import (
    EngineInfo,
    Finished,
    Pooling,
    Request,
    SamplingParams,
    SpeculationMode,
    SpeculationParams,
    StoppingParams,
)
from specdec.engine.disk_cache import open_disk_cache
from specdec.engine.engine import Engine, EngineParts
from specdec.engine.memory import draft_kv_dtype, plan_memory, report_memory
from specdec.engine.numeric_fingerprint import numeric_fingerprint
from specdec.engine.platform import HostPlatform, Target, context_limit, target_device
from specdec.engine.profile_cache import LearnedProfile, ProfileCache
from specdec.engine.profile_costs import WARM_UP_SHARE, contexts_measured, costs_at_start
from specdec.errors import ConfigError, KernelError
from specdec.grammar.compiler import GrammarCompiler
from specdec.models.decoder import KvPool, kv_page_bytes
from specdec.models.embedding import pooling_by_name
from specdec.models.fim import FimParser
from specdec.models.memory import check_memory
from specdec.models.progress import Progress
from specdec.models.resolve import adapter_base, load_tokenizer, named_draft, with_named_draft
from specdec.models.tokenizer import Tokenizer
from specdec.models.vocabulary_cut import most_frequent
from specdec.models.weights import ModelWeights
from verify_kernels.backend_selection import Kernels, load_kernels
from verify_kernels.forward_batch import PAGE_SIZE
from verify_kernels.packed_weights import PackedLinear, unpack_linear

if TYPE_CHECKING:
    from specdec.engine.build_device import DevicePlatform

_LOG = logging.getLogger(__name__)

_DTYPE_NAMES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "int8", torch.float8_e4m3fn: "fp8"
}  # fmt: skip


def read_head(config: EngineConfig, target: Target) -> HeadModel | None:
    """The configured feature head; None: none. It decides which hidden states the target's decoder keeps.

    Raises:
        ModelError: it cannot be read, or was trained for another target.
    """
    if not config.speculation.enabled or "head" not in config.drafters or config.draft_head is None:
        return None
    return _load_head(config, Path(os.path.expanduser(config.draft_head)), target)


def _load_head(config: EngineConfig, folder: Path, target: Target) -> HeadModel:
    return load_head(folder, dtype=config.dtype, target=target.config, target_embed=host_embedding(target.weights))


def host_embedding(weights: ModelWeights[Any]) -> torch.Tensor:
    """The embedding as a head on the CPU reads it: [vocab, hidden], float16 or float32."""
    embed = weights.embed
    embed = unpack_linear(embed).half() if isinstance(embed, PackedLinear) else embed.cpu()
    return embed.half() if embed.dtype == torch.bfloat16 else embed


class DrafterBuilder:
    """Builds drafters by name. A draft model runs on the target's device, a feature head on the CPU by ``kernels``."""

    def __init__(
        self,
        config: EngineConfig,
        platform: HostPlatform | DevicePlatform,
        target: Target,
        kernels: Kernels,
        sampler: Sampler,
        pages: int,
        max_context: int,
        aux_layers: Sequence[int],
        progress: Progress | None,
    ) -> None:
        """aux_layers: those of the target's decoder."""
        self._config, self._target, self._kernels, self._sampler = config, target, kernels, sampler
        self._pages, self._max_context, self._progress, self._platform = pages, max_context, progress, platform
        self._aux_layers = list(aux_layers)
        self.draft_name: str | None = None  # of the draft model, once it is loaded

    def build(self, lookups: Mapping[str, Drafter | None], head: HeadModel | None) -> list[Drafter]:
        """The configured drafters, in order. lookups: the result of `lookup_drafters`. head: that of `read_head`.

        Raises:
            ModelError: a draft model cannot be loaded, or memory is short.
            ConfigError: the draft's tokenizer does not fit.
        """
        config = self._config
        built = dict(lookups)
        if "model" in built:
            assert config.draft is not None  # validated by the configuration
            self.draft_name, built["model"] = self.model(config.draft, config.draft_dtype, self._progress)
        if "head" in built:
            built["head"] = self._head(head)
        return [drafter for drafter in built.values() if drafter is not None]

    def model(
        self, draft: str, dtype: WeightDtype | None, progress: Progress | None = None
    ) -> tuple[str, ModelBasedDrafter]:
        """Load a draft model; returns its name and its drafter. Thread-safe while an engine runs.

        draft, dtype: as in the configuration, `auto` included. On a GPU ``dtype`` is ignored: the draft has the
        target's type, or 16 bits if that is float8.

        Raises:
            ModelError: it cannot be loaded, or memory is short.
            ConfigError: its tokenizer does not reproduce the target's text.
        """
        config, target = self._config, self._target
        draft = named_draft(draft, config.target)
        cut = most_frequent(target.tokenizer.fingerprint, config.draft_vocab, target.config.vocab_size)
        model = self._platform.load_draft(draft, dtype, cut, progress)
        drafter: ModelBasedDrafter
        size, mask = target.config.vocab_size, model.config.mask_token
        same = target.tokenizer.fingerprint == model.tokenizer.fingerprint
        # Another tokenizer may split a text into more tokens; the model's own context is the limit.
        positions = self._max_context if same else min(self._max_context * 3 // 2, model.config.max_context)
        tails, fim = range(self._pages, self._pages + TAIL_POOL), FimParser(target.tokenizer)
        decoder = self._platform.draft_decoder(model, tails.stop, positions, target.config)
        if same:
            kind = ModelDrafter if mask is None else ParallelDrafter
            drafter = kind(decoder, self._sampler, size, model.weights.output_ids, tails, fim)
        else:
            if mask is not None:
                _LOG.warning("%s: drafts token by token, since its vocabulary is not the target's", model.name)
            _check_no_added_space(model)
            drafter = CrossVocabularyDrafter(
                decoder, self._sampler, target.tokenizer, model.tokenizer, size, config.max_batch
            )
        drafter.digest = model.digest
        return model.name, drafter

    def load(self, ref: str, dtype: WeightDtype | None) -> tuple[str, ModelBasedDrafter]:
        """Load a draft model, as `model`, or the feature head in the folder ``ref``, which becomes its name. A head's
        type is the target's.

        Raises:
            ModelError: it cannot be loaded, was made for another target, or memory is short.
            ConfigError: the draft's tokenizer does not fit, or the target does not keep what the head reads.
        """
        if not is_head(ref):
            return self.model(ref, dtype)
        head = _load_head(self._config, Path(os.path.expanduser(ref)), self._target)
        read = list(head.config.aux_layers)
        if not set(read) <= set(self._aux_layers):
            kept = f"the inputs of layers {self._aux_layers}" if self._aux_layers else "none"
            raise ConfigError(
                f"engine.draft_head: {ref} reads the inputs of the target's layers {read}, and this "
                f"engine keeps {kept}; set it to this head and restart"
            )
        pool = self._pages * kv_page_bytes(head.config.model, draft_kv_dtype(self._config))
        check_memory(f"engine.draft_head: the KV cache of {ref}", pool, None)
        return ref, self._head(head)

    def _head(self, head: HeadModel | None) -> HeadDrafter:
        assert head is not None  # the configuration names it, so `read_head` returned it
        network = HeadNetwork(
            head,
            self._kernels.backend(),
            KvPool(head.config.model, self._pages, draft_kv_dtype(self._config)),
            max_rows=self._config.max_step_rows,
            max_positions=self._max_context + PAGE_SIZE,
        )
        kept, read = self._aux_layers, list(head.config.aux_layers)
        width = self._target.config.hidden_size
        columns = [kept.index(at) * width + i for at in read for i in range(width)]
        drafter = HeadDrafter(network, self._sampler, None if read == kept else torch.tensor(columns))
        drafter.digest, drafter.acceptance = head.digest, head.config.acceptance
        return drafter


def _check_no_added_space(model: Target) -> None:
    """Raise ConfigError if the draft's tokenizer puts a space before every text, since texts are retokenised in
    pieces."""
    tokenizer = model.tokenizer
    if b"".join(tokenizer.token_bytes(t) for t in tokenizer.encode("a b", add_special=False)) != b"a b":
        raise ConfigError(
            f"engine.draft: the tokenizer of {model.name} adds spaces or rewrites text, so it cannot draft for "
            "another vocabulary; use a draft of the target's family, or one with a byte-level tokenizer"
        )


def lookup_drafters(config: EngineConfig, tokenizer: Tokenizer) -> dict[str, Drafter | None]:
    """The configured drafters by name, in order; None: ``none``, or one with a model of its own.

    tokenizer: the target's. It needs no weights, so that a wrong name or file is refused before they are loaded.

    Raises:
        ConfigError: a name is unknown, or an index cannot be used.
    """
    native = functools.partial(load_lookups, config.cache_dir)
    makers: dict[str, Callable[[], Drafter | None]] = {
        "none": lambda: None,
        "grammar": GrammarDrafter,
        "prediction": PredictionDrafter,
        "suffix": lambda: SuffixDrafter(native(), config.speculation.shared_tokens, FimParser(tokenizer)),
        # The files first: they are refused without a compiler too.
        "index": lambda: IndexDrafter(
            shelf=IndexShelf(config.indexes, tokenizer.fingerprint), library=native(), fim=FimParser(tokenizer)
        ),
        "model": lambda: None,
        "head": lambda: None,
    }
    drafters = {}
    for name in config.drafters if config.speculation.enabled else ():
        try:
            drafter = drafters[name] = makers[name]() if name in makers else OracleDrafter.parse(name)
        except KernelError as error:
            _LOG.warning("drafter %s is not available: %s", name, error)
            continue
        if drafter is None and name not in makers:
            known = ", ".join([*makers, "oracle:P"])
            raise ConfigError(f"engine.speculation.drafters: unknown drafter {name!r}; known: {known}")
    return drafters


def build_served_engine(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """Load everything that ``config`` names, for a front end that has validated each request. Raises as `build_parts`
    does."""
    return Engine(dataclasses.replace(build_parts(config, progress, remember=True), trusts_requests=True))


def build_parts(
    config: EngineConfig, progress: Progress | None = None, remember: bool = False, aux_layers: Sequence[int] = ()
) -> EngineParts:
    """The parts of an engine, loaded as ``config`` says. remember: read and write the profile cache of drafters, and
    build the tables of grammars in advance. aux_layers: the layers that heads loaded later will read, in place of the
    configured head's.

    Raises:
        ModelError, KernelError: a model or the kernels cannot be loaded; the message says what to change.
        ConfigError: the parts do not fit each other, or ``strict`` is set and the kernels are not bitwise.
    """
    config = with_named_draft(config)
    if config.threads > (cores := len(os.sched_getaffinity(0))):
        raise ConfigError(f"engine.threads: {config.threads} threads on {cores} cores slow each other down")
    threads = config.threads or usable_cores()
    kernels = load_kernels(config.kernels, config.cache_dir, threads)
    device = target_device(config)
    platform: HostPlatform | DevicePlatform
    if device is None:
        platform = HostPlatform(config, kernels)
    else:
        # It imports triton, which a CPU machine may lack.
        from specdec.engine.build_device import DevicePlatform, with_device_rows

        config = with_device_rows(config)
        platform = DevicePlatform(config, device)
    return assemble(config, platform, kernels, threads, progress, remember, aux_layers)


def assemble(
    config: EngineConfig,
    platform: HostPlatform | DevicePlatform,
    kernels: Kernels,
    threads: int,
    progress: Progress | None = None,
    remember: bool = False,
    aux_layers: Sequence[int] = (),
) -> EngineParts:
    """The parts of an engine with its models on ``platform``; the rest as for `build_parts`. kernels: the CPU's.
    threads: of this process."""
    on_device = not isinstance(platform, HostPlatform)
    tokenizer = load_tokenizer(config.target, config.cache_dir, progress)
    if tokenizer.pooling in tuple(Pooling):  # it generates nothing, so nothing is drafted
        off = config.speculation.model_copy(update={"enabled": False})
        config = config.model_copy(update={"speculation": off})
    lookups = lookup_drafters(config, tokenizer)
    budget = plan_memory(config, progress, on_device=on_device, tokenizer=tokenizer)
    report_memory(budget)
    folder = Path(os.path.expanduser(config.target))
    if (folder / "adapter_config.json").exists() and adapter_base(folder) is None:
        said = "engine.target: the adapter in %s is not applied; merge it (peft: merge_and_unload), or remove it"
        _LOG.warning(said, config.target)
    target = platform.load_target(progress)
    grammars = GrammarCompiler(target.tokenizer, target.config.vocab_size)
    if remember:
        grammars.prepare()  # while the rest is built
    head = read_head(config, target)
    aux_layers = aux_layers or (() if head is None else head.config.aux_layers)
    if config.kv_tokens == 0:
        config = config.model_copy(update={"kv_tokens": platform.kv_tokens(target, len(aux_layers), budget)})
    max_context = context_limit(config, target.config)
    if max_context < config.max_context:
        said = "engine.max_context: the KV cache has room for sequences of %d tokens, not of %d"
        _LOG.warning(said, max_context, config.max_context)
    pages = -(-max(config.kv_tokens, PAGE_SIZE) // PAGE_SIZE)
    decoder = platform.target_decoder(target, pages, max_context, aux_layers)
    sampler = Sampler(platform.sampling)
    builder = DrafterBuilder(config, platform, target, kernels, sampler, pages, max_context, aux_layers, progress)
    drafters = builder.build(lookups, head)
    kv_dtype, weight_bytes = _DTYPE_NAMES[platform.kv_dtype], budget.weight_bytes
    if on_device:
        embedding = 0 if target.config.tie_embeddings else target.weights.embed.nbytes
        weight_bytes = target.weights.nbytes + embedding
    info = EngineInfo(
        target=target.name, draft=builder.draft_name, dtype=target.dtype, kernels=platform.kernels,
        numeric_mode=platform.mode, max_context=max_context, vocab_size=target.config.vocab_size,
        kv_tokens=pages * PAGE_SIZE, max_batch=config.max_batch, drafters=tuple(d.name for d in drafters),
        eos_ids=tuple(target.tokenizer.eos_ids), threads=threads, version=specdec.__version__,
        kv_dtype=kv_dtype,
        indexes=tuple(config.indexes) if any(d.name == IndexDrafter.name for d in drafters) else (),
        memory_bytes=budget.needed,
        weight_bytes=weight_bytes,
        pooling=target.tokenizer.pooling or pooling_by_name(target.name),
        embedding_size=target.config.hidden_size,
        numeric_fingerprint=numeric_fingerprint(target, kv_dtype, platform.mode, platform.arithmetic),
        head="" if head is None else config.draft_head or "",
        head_acceptance=() if head is None else head.config.acceptance,
    )  # fmt: skip
    if platform.kernels == "native":
        # The kernels have their own threads; torch's would spin for milliseconds after each small copy.
        torch.set_num_threads(1)
    # A feature head caches whole pages only, so it cannot continue within one.
    kv = KvCacheManager(pages, prefix_cache=config.prefix_cache, partial_blocks=not aux_layers)
    kept = ProfileCache(config.cache_dir, "costs", _costs_key(config, info, target.digest, drafters))
    grammars.wait_until_prepared()  # before forwards are timed
    # Plain kernels compute row by row: measuring would take minutes, so costs are assumed until steps correct them.
    plain = platform.kernels == "reference"
    costs = None if plain else costs_at_start(config.speculation, decoder, drafters, kept)
    verifier = platform.verifier(decoder)
    parts = EngineParts(
        config, info, target.tokenizer, decoder, sampler, kv, drafters, costs, builder.load, verifier, grammars=grammars
    )
    parts = with_profile(parts, LearnedProfile(config.cache_dir, target.digest) if remember else None)
    return dataclasses.replace(parts, disk=open_disk_cache(config, info, kv, decoder))


def _costs_key(config: EngineConfig, info: EngineInfo, target: str, drafters: Sequence[Drafter]) -> list[object]:
    """The key of measured costs: the known properties that the time of a forward depends on."""
    drafts = [(d.name, d.digest) for d in drafters if isinstance(d, ModelBasedDrafter)]
    # Not the length of the KV cache, which depends on free memory: the time depends on the contexts that are read.
    measured = contexts_measured(min(info.kv_tokens, info.max_context))
    sizes = (info.threads, config.max_step_rows, config.max_batch, info.kv_dtype, measured)
    gpu = torch.cuda.get_device_name() if info.kernels == "triton" and torch.cuda.is_available() else ""
    return [target, drafts, info.kernels, sizes, machine(), gpu, specdec.__version__]


def with_profile(parts: EngineParts, file: LearnedProfile | None) -> EngineParts:
    """``parts`` with estimates of their drafters: from the profile cache, else from a few warm-up texts."""
    if parts.costs is None:
        return parts
    learned = {} if file is None else file.read(parts.drafters)
    if any(drafter.model_based and drafter.name not in learned for drafter in parts.drafters):
        found = warm_up(parts, WARM_UP_SHARE * parts.config.speculation.profile_s)
        learned = {name: known.bounded() for name, known in found.items()} | learned
        if file is not None:
            file.write(parts.drafters, learned)
    return dataclasses.replace(parts, learned=learned, learned_file=file)


# Code, talk and data in turn, so that a small batch has all of them. The model continues them.
WARM_UP_TEXTS = (
    "def mean(values):\n    total = 0\n    for value in values:\n",
    "User: How do I boil an egg?\nAssistant: First, you",
    '{"name": "Ada", "age": 36, "city":',
    "import json\n\n\ndef read_config(path):\n    with open(path)",
    "The weather in the mountains can change quickly, so",
    '[{"id": 1, "done": false}, {"id": 2, "done":',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(",
    "Question: What is the capital of France?\nAnswer:",
    "servers:\n  - host: alpha\n    port: 8080\n  - host: beta\n",
    "for (let i = 0; i < rows.length; i++) {\n  const row =",
    "Thank you for your message. I am writing to",
    "SELECT name, COUNT(*) FROM orders WHERE",
)
WARM_UP_DEPTH = 4  # of chains drafted by levels; deeper levels are estimated from these
WARM_UP_TEMPERATURE = 0.7  # of every other text; the others are greedy
WARM_UP_MAX_TOKENS = 32  # of an answer; usually the time is over before


def warm_up(parts: EngineParts, seconds: float) -> dict[str, Learned]:
    """Estimates of the model-based drafters of ``parts``, from decoding `WARM_UP_TEXTS` together for about ``seconds``.

    It leaves no text, page, count or trace entry behind.
    """
    began = time.monotonic()
    drafters = [drafter for drafter in parts.drafters if drafter.model_based]
    speculation = parts.config.speculation.model_copy(update={"trace_file": None})
    config = parts.config.model_copy(update={"speculation": speculation})
    kv = KvCacheManager(parts.kv.n_total, prefix_cache=False)
    engine = Engine(
        dataclasses.replace(parts, config=config, kv=kv, drafters=drafters, disk=None, learned_file=None, trace_steps=0)
    )
    depth = max(WARM_UP_DEPTH, *(drafter.tree_rows for drafter in drafters))
    wish = SpeculationParams(SpeculationMode.ON, None, depth, depth, 1)
    stop = StoppingParams(max_tokens=WARM_UP_MAX_TOKENS, ignore_eos=True)
    for number, text in enumerate(WARM_UP_TEXTS):
        ids = tuple(parts.tokenizer.encode(text))[: parts.info.max_context // 2]
        sampling = SamplingParams(temperature=WARM_UP_TEMPERATURE * (number % 2), seed=number)
        engine.submit(Request(f"warm-up-{number}", ids, sampling, stop, speculation=wish))
    while engine.has_work() and time.monotonic() - began < seconds:
        if any(isinstance(event, Finished) for event in engine.step()):
            break  # the batch shrinks from here on
    learned = engine.learned()
    engine.close()
    return learned
