"""Prompts that look like people's: code, prose, edits and chat, of different lengths."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from specdec.models.tokenizer import Tokenizer
from specdec.types import GrammarKind, GrammarParams, OutputParams, Request, SamplingParams, StoppingParams

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

# Longer than a page in any vocabulary: requests that begin with it share cached pages.
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
    GrammarParams(GrammarKind.EBNF, 'start: "(" INT (", " INT)* ")"\nINT: /[0-9]{1,3}/'),
)


def make_requests(tokenizer: Tokenizer, count: int, seed: int, max_tokens: int) -> Iterator[Request]:
    """``count`` requests: a third greedy, the others sampled with every option in turn, some in a grammar or of a
    session; most ask for logprobs."""
    rng = random.Random(seed)
    for number in range(count):
        preamble = PREAMBLE if number % 4 == 1 else ""
        text = preamble + " ".join(rng.sample(TEXTS, rng.choice((1, 1, 2, 3))))
        prompt = tuple(tokenizer.encode(text))
        stop = ("\n\n",) if number % 7 == 3 else ()
        stopping = StoppingParams(max_tokens=rng.randint(max_tokens // 2, max_tokens), stop=stop, ignore_eos=True)
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
    """``request`` with a prediction as a caller's might be: its ``output``, with something missing and something of
    the prompt put in its place."""
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
        # Few tokens under a strong penalty: every drafted token changes what may follow it.
        SamplingParams(temperature=0.0, frequency_penalty=0.8, allowed_token_ids=tuple(range(20, 32)), seed=seed),
    )
    return kinds[number % len(kinds)]
