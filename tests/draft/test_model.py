"""The model drafter: its KV must stay valid, which only acceptance can show.

Stale draft KV never changes the output, so path identity is blind to it. Here the draft *is* the target: in greedy
decoding every proposal must be accepted, whatever happened to the sequence before.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path

from draft.model import ModelDrafter
from specdec.engine.build import build_parts
from specdec.engine.engine import Engine, EngineParts
from specdec.kv_cache import KvCacheManager
from specdec.types import Finished, Request, SamplingParams, StoppingParams
from tests.engine.tiny_engine import drain, tiny_parts

CHAIN = 4


@cache
def twin_parts() -> EngineParts:
    """Parts whose draft model is the target itself, drafting chains."""
    config = tiny_parts().config
    speculation = config.speculation.model_copy(
        update={"drafters": ("model",), "max_nodes": CHAIN, "max_depth": CHAIN, "width": 1}
    )
    target = str(Path(config.target))
    return build_parts(config.model_copy(update={"draft": target, "speculation": speculation, "prefill_chunk": 24}))


def twin_engine() -> Engine:
    parts = twin_parts()
    kv = KvCacheManager(parts.info.kv_tokens // 64, prefix_cache=True)
    return Engine(dataclasses.replace(parts, kv=kv))


def ask(name: str, prompt: tuple[int, ...], max_tokens: int = 41) -> Request:
    sampling = SamplingParams(temperature=0.0, allowed_token_ids=tuple(range(300)))
    return Request(name, prompt, sampling, StoppingParams(max_tokens=max_tokens, ignore_eos=True))


def rejected(engine: Engine) -> int:
    """Draft tokens verified and not accepted, over all requests that finish now."""
    done = [e for e in drain(engine) if isinstance(e, Finished)]
    assert done
    assert sum(e.stats.num_accepted_draft_tokens for e in done) > 20
    return sum(e.stats.num_draft_tokens - e.stats.num_accepted_draft_tokens for e in done)


def test_a_chunked_prompt_leaves_no_gap() -> None:
    engine = twin_engine()
    engine.submit(ask("a", tuple(range(5, 155))))
    assert rejected(engine) == 0


def test_a_prefix_hit_covers_the_draft() -> None:
    engine = twin_engine()
    prompt = tuple(range(5, 155))
    engine.submit(ask("a", prompt))
    drain(engine)
    engine.submit(ask("b", (*prompt, 7, 8, 9)))
    assert rejected(engine) == 0


def test_a_prefix_that_the_draft_never_saw_is_computed() -> None:
    engine = twin_engine()
    prompt = tuple(range(5, 155))
    parts = twin_parts()
    silent = dataclasses.replace(parts, drafters=[], kv=engine._kv)
    quiet = Engine(silent)
    quiet.submit(ask("a", prompt))
    drain(quiet)
    engine.submit(ask("b", prompt))
    assert rejected(engine) == 0


def test_preemption_is_recovered_from() -> None:
    engine = twin_engine()
    for i in range(3):
        engine.submit(ask(f"r{i}", tuple(range(5 + i, 105 + i))))
    for _ in range(3):
        engine.step()
        for _ in range(6):
            engine.step()
        engine.preempt_newest()
    assert rejected(engine) == 0


def test_a_token_beyond_the_drafts_vocabulary_costs_only_its_request() -> None:
    engine = twin_engine()
    (drafter,) = twin_parts().drafters
    assert isinstance(drafter, ModelDrafter)
    decoder = drafter._decoder
    full = decoder.config
    decoder.config = dataclasses.replace(full, vocab_size=300)
    try:
        engine.submit(ask("odd", (350, 5, 6, 7), max_tokens=9))
        engine.submit(ask("fine", tuple(range(5, 105))))
        done = {e.request_id: e for e in drain(engine) if isinstance(e, Finished)}
    finally:
        decoder.config = full
    assert done["odd"].stats.num_draft_tokens == 0
    assert done["fine"].stats.num_draft_tokens > 0
