"""Decodes short texts before an engine serves, to estimate the acceptance of its drafters."""

from __future__ import annotations

import dataclasses
import time

from specdec.control.estimates.learned import Learned
from specdec.core.kv_cache import KvCacheManager
from specdec.core.types import Finished, Request, SamplingParams, SpeculationMode, SpeculationParams, StoppingParams
from specdec.engine.engine import Engine, EngineParts

# Code, talk and data in turn, so that a small batch has all of them. The model continues them.
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
DEPTH = 4  # of the drafted chains; deeper levels are estimated from these
TEMPERATURE = 0.7  # of every other text; the others are greedy
MAX_TOKENS = 32  # of an answer; usually the time is over before


def warm_up(parts: EngineParts, seconds: float) -> dict[str, Learned]:
    """Estimates of the model-based drafters of ``parts``, from decoding `TEXTS` together for about ``seconds``.

    It leaves no text, page, count or trace entry behind.
    """
    began = time.monotonic()
    drafters = [drafter for drafter in parts.drafters if drafter.model_based]
    speculation = parts.config.speculation.model_copy(update={"trace_file": None})
    config = parts.config.model_copy(update={"speculation": speculation})
    kv = KvCacheManager(parts.kv.n_total, prefix_cache=False)
    engine = Engine(
        dataclasses.replace(parts, config=config, kv=kv, drafters=drafters, learned_file=None, trace_steps=0)
    )
    wish = SpeculationParams(SpeculationMode.ON, None, DEPTH, DEPTH, 1)
    stop = StoppingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    for number, text in enumerate(TEXTS):
        ids = tuple(parts.tokenizer.encode(text))[: parts.info.max_context // 2]
        sampling = SamplingParams(temperature=TEMPERATURE * (number % 2), seed=number)
        engine.submit(Request(f"warm-up-{number}", ids, sampling, stop, speculation=wish))
    while engine.has_work() and time.monotonic() - began < seconds:
        if any(isinstance(event, Finished) for event in engine.step()):
            break  # the batch shrinks from here on
    learned = engine.learned()
    engine.close()
    return learned
