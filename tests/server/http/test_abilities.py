"""What the model can do is found out, not assumed."""

from __future__ import annotations

import pytest

from server.http.call import fills_in
from specdec.errors import EngineDeadError
from tests.server.http.calls import Fim, make_face


async def test_filling_in_needs_an_encoder() -> None:
    assert await fills_in(make_face(fim=Fim()))
    assert not await fills_in(make_face())


async def test_nothing_is_said_before_the_model_is_there() -> None:
    face = make_face(fim=Fim())
    face.frontend.tokenizer = None
    with pytest.raises(EngineDeadError):
        await fills_in(face)
