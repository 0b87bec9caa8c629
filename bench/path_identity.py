"""`specdec verify`: checks path identity by decoding the same requests under many conditions."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specdec.config import EngineConfig
from specdec.control.estimates.costs import CostTable
from specdec.core.kv_cache import KvCacheManager
from specdec.core.types import (
    Delta,
    Failed,
    Finished,
    GrammarKind,
    GrammarParams,
    OutputParams,
    Request,
    SamplingParams,
    SpeculationMode,
    StoppingParams,
)
from specdec.engine.engine import Engine, EngineParts
from specdec.engine.profile_costs import StepCosts
from specdec.errors import ConfigError, SpecdecError
from specdec.load.figures import FigureTable
from specdec.models.tokenizer import Tokenizer

TEXTS = (
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
    "import numpy as np\n\nx = np.zeros((3, 4))\ny = np.zeros((3, 4))\nz = np.",
    "Once upon a time there was a small engine that wanted to be fast. Every morning it",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
    "        self.items.append(item)\n\n    def pop(self):\n        return self.items.pop()\n\n    def peek(self):\n",
    "Q: What is 2 + 2?\nA: 4\nQ: What is 3 + 5?\nA: 8\nQ: What is 6 + 1?\nA:",
    "SELECT name, age FROM users WHERE age > 21 ORDER BY name;\nSELECT name, city FROM users WHERE",
    "for i in range(10):\n    print(i)\nfor j in range(10):\n    print(j)\nfor k in range(",
    "Dear Sir or Madam,\n\nI am writing to you about the order that I placed on Monday. The",
    "<ul>\n  <li>one</li>\n  <li>two</li>\n  <li>three</li>\n",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of",
    '{"name": "Ada", "born": 1815}\n{"name": "Alan", "born": 1912}\n{"name": "Grace", "born":',
)

# Longer than a KV page in any vocabulary, so requests that begin with it share cached pages.
PREAMBLE = (
    "You are a careful assistant who answers questions about programs. Read the text that follows, keep to its style, "
    "do not repeat it needlessly, and continue exactly where it ends. Prefer short names, plain sentences and small "
    "functions; say what a function returns, which errors it raises, and in which units its arguments are given. "
    "When something is unclear, choose the simplest reading that a user would expect, and carry on from there.\n\n"
)


GRAMMARS = (
    GrammarParams(
        GrammarKind.JSON_SCHEMA,
        '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "born": {"type": "integer"}, '
        '"alive": {"type": "boolean"}}, "required": ["name", "born", "alive"], "additionalProperties": false}',
    ),
    GrammarParams(GrammarKind.REGEX, r"(the|a|one) [a-z]{2,9}( and [a-z]{2,9})*\."),
    GrammarParams(GrammarKind.CHOICE, '["certainly, and at once", "certainly not", "perhaps"]'),
    GrammarParams(GrammarKind.JSON_OBJECT),
    GrammarParams(GrammarKind.EBNF, 'start: "(" INT (", " INT)* ")" | "[" INT ("; " INT)* "]"\nINT: /[0-9]{1,3}/'),
    GrammarParams(GrammarKind.EBNF, "start: " + "<[30]> <[31]> " * 8 + "/[a-z ]+/"),
)


def make_requests(tokenizer: Tokenizer, count: int, seed: int, max_tokens: int) -> Iterator[Request]:
    """``count`` requests that cover greedy and sampled decoding with every option, grammars and sessions. Most request
    log-probabilities."""
    rng = random.Random(seed)
    for number in range(count):
        preamble = PREAMBLE if number % 4 == 1 else ""
        text = preamble + " ".join(rng.sample(TEXTS, rng.choice((1, 1, 2, 3))))
        prompt = tuple(tokenizer.encode(text))
        stop = ("\n\n",) if number % 7 == 3 else ()
        stopping = StoppingParams(
            max_tokens=rng.randint(max(1, max_tokens // 2), max_tokens), stop=stop, ignore_eos=True
        )
        logprobs = (0, 3, None)[number % 3]
        sampling = _sampling(rng, number)
        grammar = GRAMMARS[number // 5 % len(GRAMMARS)] if number % 5 == 3 and tokenizer.eos_ids else None
        yield Request(
            f"r{number}",
            prompt,
            replace(sampling, allowed_token_ids=()) if grammar else sampling,
            stopping,
            OutputParams(logprobs=logprobs),
            session=("", "editor", "chat")[number % 3],
            grammar=grammar,
        )


def predicted(request: Request, output: Sequence[int], rng: random.Random) -> Request:
    """The request with an almost correct prediction: its ``output``, with some tokens replaced by tokens of the
    prompt."""
    cut, gap = rng.randrange(len(output) + 1), rng.randrange(4)
    wrong = request.prompt_ids[: rng.randrange(4)]
    return replace(request, prediction_ids=(*output[:cut], *wrong, *output[cut + gap :]))


def _sampling(rng: random.Random, number: int) -> SamplingParams:
    seed = rng.getrandbits(64)
    kinds = (
        SamplingParams(temperature=0.0, seed=seed),
        SamplingParams(temperature=rng.uniform(0.2, 1.5), seed=seed),
        SamplingParams(temperature=0.8, top_k=rng.randint(2, 60), top_p=rng.uniform(0.5, 0.99), seed=seed),
        SamplingParams(temperature=0.0, repetition_penalty=1.2, seed=seed),
        SamplingParams(temperature=1.0, min_p=0.05, frequency_penalty=0.5, presence_penalty=0.3, seed=seed),
        SamplingParams(temperature=0.7, seed=seed, n=2, logit_bias=((11, 2.0), (13, -3.0))),
        # Few allowed tokens and a strong penalty: every drafted token changes the next choice.
        SamplingParams(temperature=0.0, frequency_penalty=0.8, allowed_token_ids=tuple(range(20, 32)), seed=seed),
    )
    return kinds[number % len(kinds)]


@dataclass(frozen=True, slots=True)
class BatchConditions:
    """One way to run the same requests."""

    name: str
    drafters: tuple[str, ...] = ()  # empty: plain decode
    max_nodes: int = 0  # bounds of a tree
    max_depth: int = 0
    width: int = 1
    concurrency: int = 1  # requests in flight
    prefill_chunk: int = 192  # prompt rows per step
    kv_pages: int | None = None  # size of the KV cache; None: all of it
    preempt_every: int = 0  # steps between forced preemptions; 0: none
    prefix_cache: bool = True
    warm: bool = False  # decode every prompt once before, so that prefixes are cached
    controlled: bool = False  # mode AUTO: the controller decides within the bounds; else mode ON: every step drafts
    free: bool = False  # the controller's costs of drafting are almost 0, so that it drafts more


PLAIN = BatchConditions("plain decode, one at a time", prefix_cache=False)


def standard_conditions(drafters: tuple[str, ...], max_batch: int) -> list[BatchConditions]:
    """The batch conditions of `specdec verify`, for the loaded ``drafters``."""
    many = min(8, max_batch)
    all_conditions = [
        BatchConditions("plain, many at once", concurrency=many),
        BatchConditions("plain, chunks of 7", concurrency=many, prefill_chunk=7),
        BatchConditions("plain, prefix hits", concurrency=2, warm=True),
        BatchConditions("plain, preempted", concurrency=many, preempt_every=5, prefill_chunk=33),
    ]
    if drafters:
        all_conditions += [
            BatchConditions("controlled", drafters, 31, 31, 3, controlled=True, warm=True),
            BatchConditions("controlled, many at once", drafters, 31, 31, 3, controlled=True, concurrency=many),
            BatchConditions("controlled, drafts free", drafters, 20, 12, 4, controlled=True, free=True, concurrency=3),
            BatchConditions(
                "controlled, free, preempted", drafters, 15, 15, 2, controlled=True, free=True, concurrency=many,
                preempt_every=6, prefill_chunk=40,
            ),
        ]  # fmt: skip
    sets = [(name,) for name in drafters] + ([drafters] if len(drafters) > 1 else [])
    for chosen in sets:
        name = "+".join(chosen)
        all_conditions += [
            BatchConditions(f"{name}, chain of 4", chosen, 4, 4, 1),
            BatchConditions(f"{name}, wide tree", chosen, 15, 4, 4, concurrency=3, prefill_chunk=50),
            BatchConditions(f"{name}, tree among many", chosen, 7, 7, 2, concurrency=many, warm=True),
            BatchConditions(
                f"{name}, tree, preempted", chosen, 10, 5, 3, concurrency=many, preempt_every=4, prefill_chunk=20
            ),
        ]
    return all_conditions


@dataclass(slots=True)
class Outcome:
    """What is compared, without tolerance, of one sample; and its statistics."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, tuple[tuple[int, float], ...]]] = field(default_factory=list)  # with the top ones
    finish: str = ""
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0


Outcomes = dict[tuple[str, int], Outcome]


def run_conditions(parts: EngineParts, conditions: BatchConditions, requests: Sequence[Request]) -> Outcomes:
    """Outcomes of ``requests`` on a new engine over the weights of ``parts``, by (request id, sample index).

    Raises:
        SpecdecError: a request failed.
    """
    engine = Engine(_assemble(parts, conditions))
    if conditions.warm:
        _decode(engine, requests, conditions)
    return _decode(engine, requests, conditions)


def _assemble(parts: EngineParts, conditions: BatchConditions) -> EngineParts:
    speculation = parts.config.speculation.model_copy(
        update={
            "enabled": bool(conditions.drafters),
            "max_nodes": conditions.max_nodes,
            "max_depth": conditions.max_depth,
            "width": conditions.width,
            "trace_file": None,
        }
    )
    config: EngineConfig = parts.config.model_copy(
        update={
            "speculation": speculation,
            "prefill_chunk": min(conditions.prefill_chunk, parts.config.max_step_rows),
        }
    )
    pages = parts.info.kv_tokens // 64 if conditions.kv_pages is None else conditions.kv_pages
    drafters = [d for d in parts.drafters if d.name in conditions.drafters]
    # A small cache must hold the longest request, so it also limits the context.
    limit = min(parts.info.max_context, pages * 64 - 64)
    info = replace(parts.info, max_context=limit)
    kv = KvCacheManager(pages, prefix_cache=conditions.prefix_cache)
    costs = _free_drafting(parts) if conditions.free else parts.costs
    return replace(parts, config=config, info=info, drafters=drafters, kv=kv, disk=None, costs=costs)


def _free_drafting(parts: EngineParts) -> StepCosts:
    """Costs with which the controller drafts at every chance: rows cost little, drafting nothing."""
    rows = [1, parts.config.max_step_rows]
    verify = CostTable(rows, [0], [[1e6, 1.01e6]]).as_dict()
    level = CostTable(rows, [0], [[1.0, 1.0]]).as_dict()
    return StepCosts(verify, {drafter.name: level for drafter in parts.drafters if drafter.model_based})


def _in_mode(request: Request, conditions: BatchConditions) -> Request:
    speculation = replace(request.speculation, mode=SpeculationMode.AUTO)
    if not conditions.controlled:
        nodes, depth = conditions.max_nodes, conditions.max_depth
        speculation = replace(speculation, mode=SpeculationMode.ON, max_nodes=nodes, max_depth=depth)
    return replace(request, speculation=speculation)


def _decode(engine: Engine, requests: Sequence[Request], conditions: BatchConditions) -> Outcomes:
    outcomes: Outcomes = {}
    steps = 0
    waiting = list(reversed(requests))
    running: dict[str, int] = {}
    while waiting or running:
        while waiting and len(running) < conditions.concurrency:
            request = waiting.pop()
            engine.submit(_in_mode(request, conditions))
            running[request.request_id] = request.sampling.n
        steps += 1
        if conditions.preempt_every and steps % conditions.preempt_every == 0:
            engine.preempt_newest()
        for event in engine.step():
            if isinstance(event, Failed):
                raise SpecdecError(f"request {event.request_id} failed: {event.message}")
            if not isinstance(event, Delta | Finished):
                continue
            outcome = outcomes.setdefault((event.request_id, event.index), Outcome())
            if isinstance(event, Delta):
                outcome.tokens += event.token_ids
                outcome.logprobs += [(entry.logprob, tuple(entry.top)) for entry in event.logprobs]
            else:
                outcome.finish = str(event.reason)
                outcome.drafted = event.stats.num_draft_tokens
                outcome.accepted = event.stats.num_accepted_draft_tokens
                outcome.preemptions = event.usage.preemptions
                running[event.request_id] -= 1
                if running[event.request_id] == 0:
                    del running[event.request_id]
    return outcomes


def first_mismatches(conditions: str, plain: Outcomes, other: Outcomes) -> list[str]:
    """A sentence about each sample that differs from plain decode in a token, a log-probability or its finish reason:
    the first difference, with the tokens before it."""
    found = []
    for (request_id, index), expected in plain.items():
        got = other.get((request_id, index), Outcome())
        if (difference := _difference(expected, got)) is not None:
            position, left, right = difference
            found.append(
                f"request {request_id} sample {index} under batch conditions `{conditions}`, output token {position}: "
                f"expected {left}, got {right}; the tokens before: {expected.tokens[max(0, position - 8) : position]}"
            )
    return found


def _difference(expected: Outcome, got: Outcome) -> tuple[int, str, str] | None:
    for position, (left, right) in enumerate(itertools.zip_longest(expected.tokens, got.tokens)):
        if left != right:
            return position, f"token {left}", f"token {right}"
    for position, (one, two) in enumerate(itertools.zip_longest(expected.logprobs, got.logprobs)):
        if one != two:
            return position, f"log-probabilities {one}", f"{two}"
    if expected.finish != got.finish:
        return len(expected.tokens), f"end by {expected.finish}", f"end by {got.finish}"
    return None


@dataclass(frozen=True, slots=True)
class ConditionsResult:
    conditions: BatchConditions
    pairs: int  # samples, each compared with the same sample of plain decode
    tokens: int
    accepted: int  # tokens that came from drafts
    preemptions: int
    mismatches: int


@dataclass(slots=True)
class VerifyReport:
    """Decoding under all conditions compared with plain decode."""

    plain: ConditionsResult
    results: list[ConditionsResult] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)

    def total(self, count: str) -> int:
        """The sum of one count of `ConditionsResult` over all conditions."""
        return sum(getattr(result, count) for result in self.results)

    def as_dict(self) -> dict[str, Any]:
        return {
            **{count: self.total(count) for count in ("pairs", "tokens", "accepted", "preemptions", "mismatches")},
            "first_mismatch": self.mismatches[0] if self.mismatches else None,
            "conditions": {r.conditions.name: {"pairs": r.pairs, "mismatches": r.mismatches} for r in self.results},
        }

    def table(self) -> FigureTable:
        rows = [
            [r.conditions.name, *map(str, (r.pairs, r.tokens, r.accepted, r.preemptions, r.mismatches))]
            for r in (self.plain, *self.results)
        ]
        heads = ["conditions", "pairs", "tokens", "drafted", "preempted", "mismatches"]
        return FigureTable(heads, rows, "path identity")


MIN_REQUESTS = 14  # fewer would omit some kinds of sampling


def verify(
    parts: EngineParts, *, pairs: int, max_tokens: int, seed: int, say: Callable[[str], Any] = lambda _: None
) -> VerifyReport:
    """Decode requests plainly, then under all standard conditions, and compare at least ``pairs`` pairs of samples.

    Raises:
        ConfigError: the context is too small for the prompts.
    """
    all_conditions = standard_conditions(tuple(d.name for d in parts.drafters), parts.config.max_batch)
    count = max(MIN_REQUESTS, -(-pairs // len(all_conditions)))
    drawn = make_requests(parts.tokenizer, 10 * count, seed, max_tokens)
    fitting = (r for r in drawn if len(r.prompt_ids) + (r.stopping.max_tokens or 0) <= parts.info.max_context)
    requests = list(itertools.islice(fitting, count))
    if len(requests) < count:
        raise ConfigError(
            f"engine.max_context: {parts.info.max_context} tokens hold too few of the prompts; "
            "raise max_context or kv_tokens, or lower --max-tokens"
        )
    say(f"{len(requests)} requests, plain and one at a time")
    plain = run_conditions(parts, PLAIN, requests)
    report = VerifyReport(_result(PLAIN, plain, 0))
    rng = random.Random(seed)
    # Every other request gets an almost correct prediction.
    requests = [
        predicted(request, plain[request.request_id, 0].tokens, rng) if number % 2 else request
        for number, request in enumerate(requests)
    ]
    total, began_s = len(plain) * len(all_conditions), time.monotonic()
    for conditions in all_conditions:
        passed_s = time.monotonic() - began_s
        done = report.total("pairs")
        left = f", about {passed_s / done * (total - done):.0f} s left" if done else ""
        say(f"{done} of {total} pairs{left}; now {conditions.name}")
        outcomes = run_conditions(parts, conditions, requests)
        found = first_mismatches(conditions.name, plain, outcomes)
        report.mismatches += found
        report.results.append(_result(conditions, outcomes, len(found)))
    return report


def _result(conditions: BatchConditions, outcomes: Outcomes, mismatches: int) -> ConditionsResult:
    return ConditionsResult(
        conditions=conditions,
        pairs=len(outcomes),
        tokens=sum(len(o.tokens) for o in outcomes.values()),
        accepted=sum(o.accepted for o in outcomes.values()),
        preemptions=sum(o.preemptions for o in outcomes.values()),
        mismatches=mismatches,
    )
