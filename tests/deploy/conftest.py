"""What a server exports once it has served and rejected."""

from __future__ import annotations

import dataclasses

import pytest

from specdec.core.types import DrafterStats
from tests.server.http.harness import running
from tests.server.observe.metrics.scrape import Scrape


@pytest.fixture(scope="session")
def exported() -> Scrape:
    with running() as server:
        engine = server.serving.client.engine
        engine.adopt(dataclasses.replace(engine.info, head_acceptance=(0.75,)), engine.config)
        server.serving._observer.metrics.stats.by_drafter["head"] = DrafterStats()
        server.ask(prompt="hello", n=2)
        server.refused(prompt="x", temperature=-1)
        assert server.comes_to(lambda: "refusals" in server.client.get("/metrics").text)
        return Scrape(server.client.get("/metrics").text)
