"""What the model can do is found out, not assumed."""

from __future__ import annotations

import pytest

from server.http.call import fills_in
from specdec.errors import EngineDeadError
from tests.server.http.calls import Fim, make_context


async def test_filling_in_needs_an_encoder() -> None:
    assert await fills_in(make_context(fim=Fim()))
    assert not await fills_in(make_context())


async def test_nothing_is_said_before_the_model_is_there() -> None:
    server = make_context(fim=Fim())
    server.frontend.tokenizer = None
    with pytest.raises(EngineDeadError):
        await fills_in(server)
