"""Which lookup drafters an engine gets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specdec.cli.options import _DRAFTERS
from specdec.config import EngineConfig, SpeculationConfig
from specdec.engine.build import lookup_drafters
from specdec.errors import ConfigError
from tests.engine.test_every_drafter import ALL
from tests.engine.tiny_engine import tiny_parts
from tools.markdown import REPOSITORY


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


def test_every_drafter_is_tried_beside_the_others_and_documented(tmp_path: Path) -> None:
    config = EngineConfig(cache_dir=tmp_path, speculation=SpeculationConfig(drafters=("unknown",)))
    with pytest.raises(ConfigError, match="known: ") as refused:
        lookup_drafters(config, tiny_parts().tokenizer)
    known = set(str(refused.value).rpartition("known: ")[2].split(", ")) - {"none", "oracle:P"}
    assert known <= set(ALL), "name it in ALL of tests/engine/test_every_drafter.py"
    documents = [
        (REPOSITORY / "docs" / page).read_text(encoding="utf-8") for page in ("concepts.md", "architecture.md")
    ]
    for name in known:
        assert re.search(rf"\b{name}\b", _DRAFTERS), f"{name}: name it in the help of --drafter"
        assert all(f"| `{name}` |" in text for text in documents), f"{name}: give it a row in the tables of drafters"
