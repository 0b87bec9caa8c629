"""Short texts that a new engine goes on with before it serves: what its draft models are worth on them."""

from __future__ import annotations

import dataclasses
import time

from specdec.control.estimates.learned import Learned
from specdec.core.kv_cache import KvCacheManager
from specdec.core.types import Finished, Request, SamplingParams, SpeculationMode, SpeculationParams, StoppingParams
from specdec.engine.engine import Engine, EngineParts

# Code, talk and data in turn, as far as a small batch goes; the model goes on with them, so they end in the middle.
TEXTS = (
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
DEPTH = 4  # of the chains drafted: what is deeper is told by what is not
SAMPLED = 0.7  # temperature of every other text; the rest is greedy, as most requests are one or the other
TOKENS = 32  # of an answer at most; the time is mostly up before


def warm_up(parts: EngineParts, seconds: float) -> dict[str, Learned]:
    """What the model-based drafters of ``parts`` are worth on `TEXTS`, all decoded at once for about ``seconds``.

    Nothing of it stays: neither text nor pages, nor does a count or a trace tell of it.
    """
    began = time.monotonic()
    drafters = [drafter for drafter in parts.drafters if drafter.model_based]
    speculation = parts.config.speculation.model_copy(update={"trace_file": None, "trace_steps": 0})
    config = parts.config.model_copy(update={"speculation": speculation})
    kv = KvCacheManager(parts.kv.n_total, prefix_cache=False)
    engine = Engine(dataclasses.replace(parts, config=config, kv=kv, drafters=drafters, learned_file=None))
    wish = SpeculationParams(SpeculationMode.ON, None, DEPTH, DEPTH, 1)
    stop = StoppingParams(max_tokens=TOKENS, ignore_eos=True)
    for number, text in enumerate(TEXTS[: config.max_queued_requests]):
        ids = tuple(parts.tokenizer.encode(text))[: parts.info.max_context // 2]
        sampling = SamplingParams(temperature=SAMPLED * (number % 2), seed=number)
        engine.submit(Request(f"warm-up-{number}", ids, sampling, stop, speculation=wish))
    while engine.has_work() and time.monotonic() - began < seconds:
        if any(isinstance(event, Finished) for event in engine.step()):
            break  # from here on it is fewer of them at once
    learned = engine.learned()
    engine.close()
    return learned
