"""The model's capabilities are detected, not assumed."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from server.served_model import ServedModel
from specdec.config import EngineConfig
from specdec.errors import EngineDeadError
from tests.server.http.calls import Fim, make_model


def test_fill_in_the_middle_needs_an_encoder() -> None:
    assert make_model(fim=Fim()).fills_in
    assert not make_model().fills_in


def test_nothing_is_reported_before_the_model_is_loaded() -> None:
    model = ServedModel(SimpleNamespace(engine=SimpleNamespace(config=EngineConfig(target="m")), file_errors=Counter()))  # type: ignore[arg-type]
    with pytest.raises(EngineDeadError):
        _ = model.fills_in
