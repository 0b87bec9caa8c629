"""Short texts that a new engine goes on with before it serves: what its draft models are worth on them."""

from __future__ import annotations

import dataclasses
import time

from specdec.control.learned import Learned
from specdec.engine.engine import Engine, EngineParts
from specdec.kv_cache import KvCacheManager
from specdec.types import Finished, Request, SamplingParams, SpeculationMode, SpeculationParams, StoppingParams

# What requests are mostly about; the model goes on with them, so they end in the middle.
TEXTS = (
    "def mean(values):\n    total = 0\n    for value in values:\n",
    "import json\n\n\ndef read_config(path):\n    with open(path)",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(",
    "for (let i = 0; i < rows.length; i++) {\n  const row =",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "User: How do I boil an egg?\nAssistant: First, you",
    "The weather in the mountains can change quickly, so",
    "Question: What is the capital of France?\nAnswer:",
    "Thank you for your message. I am writing to",
    '{"name": "Ada", "age": 36, "city":',
    '[{"id": 1, "done": false}, {"id": 2, "done":',
    "servers:\n  - host: alpha\n    port: 8080\n  - host: beta\n",
)
DEPTH = 4  # of the chains drafted: what is deeper is told by what is not
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
        engine.submit(Request(f"warm-up-{number}", ids, SamplingParams(temperature=0.0), stop, speculation=wish))
    while engine.has_work() and time.monotonic() - began < seconds:
        if any(isinstance(event, Finished) for event in engine.step()):
            break  # from here on it is fewer of them at once
    learned = engine.learned()
    engine.close()
    return learned
