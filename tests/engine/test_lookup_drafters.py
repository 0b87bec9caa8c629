"""Which lookup drafters an engine gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.config import EngineConfig, SpeculationConfig
from specdec.engine.build import lookup_drafters
from specdec.errors import ConfigError
from tests.engine.tiny_engine import tiny_parts


def test_without_a_compiler_those_that_need_none_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = tiny_parts().tokenizer
    monkeypatch.setenv("PATH", str(tmp_path))
    config = EngineConfig(cache_dir=tmp_path, speculation=SpeculationConfig(drafters=("prediction", "suffix")))
    assert list(lookup_drafters(config, tokenizer)) == ["prediction"]
    with pytest.raises(ConfigError, match=r"engine\.indexes\.mine: index .* does not exist"):
        lookup_drafters(EngineConfig(cache_dir=tmp_path, indexes={"mine": tmp_path / "none"}), tokenizer)
    assert "drafter suffix is not available: no C++ compiler (g++) found; install one" in caplog.text
