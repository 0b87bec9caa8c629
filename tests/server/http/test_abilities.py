"""What the model can do is found out, not assumed."""

from __future__ import annotations

import pytest

from specdec.errors import EngineDeadError
from tests.server.http.calls import Fim, make_context


def test_filling_in_needs_an_encoder() -> None:
    assert make_context(fim=Fim()).frontend.fills_in
    assert not make_context().frontend.fills_in


def test_nothing_is_said_before_the_model_is_there() -> None:
    server = make_context(fim=Fim())
    server.frontend.tokenizer = None
    with pytest.raises(EngineDeadError):
        _ = server.frontend.fills_in
