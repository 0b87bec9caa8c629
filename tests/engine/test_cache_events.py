"""A real engine publishes its cached pages as they become findable, with drafts and preemption."""

from __future__ import annotations

from server.kv_event_messages import block_hash, pack_batch
from specdec.core.cache_events import CacheRecorder
from specdec.core.types import Request, StoppingParams
from tests.engine.tiny_engine import tiny_engine
from tests.server.kv_events.subscriber import CacheView, decoded


def test_after_every_step_the_events_reproduce_the_cache() -> None:
    engine, recorder, view = tiny_engine(pages=9), CacheRecorder(salted=False), CacheView()
    engine.follow_cache(recorder)
    for number in range(3):
        prompt = tuple((7 * (number) + i) % 50 + 1 for i in range(150 + 10 * number))
        engine.submit(Request(f"r{number}", prompt, stopping=StoppingParams(max_tokens=12)))
    steps = 0
    while engine.has_work():
        engine.step()
        steps += 1
        if steps % 7 == 0:
            engine.preempt_newest()
        view.apply(decoded(pack_batch(recorder.take(), "map")))
        assert set(view.blocks) == {block_hash(key) for key in engine._kv._index.page_of}
    assert len(view.blocks) > 2
    engine.flush_cache()
    view.apply(decoded(pack_batch(recorder.take(), "map")))
    assert view.blocks == {}
