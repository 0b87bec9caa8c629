"""The prompts of all engines: number, lengths and warm-ups."""

from __future__ import annotations

import pytest

from bench.peers import peers_session as module
from bench.peers.peers_session import WARM_TOKENS, peer_prompts
from bench.workloads.workload import Workload
from specdec.config import EngineConfig
from specdec.load.request import LoadRequest
from specdec.models.resolve import load_tokenizer
from specdec.models.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    config = EngineConfig()
    return load_tokenizer(config.target, config.cache_dir)


@pytest.mark.model
def test_each_workload_has_its_prompts_behind_one_that_warms_up(tokenizer: Tokenizer) -> None:
    notes: list[str] = []
    names = ("humaneval", "edit", "fim", "chat")
    found = peer_prompts(tokenizer, names, 2, 50, notes.append)
    assert list(found) == ["humaneval", "edit", "chat"]
    for name, asks in found.items():
        assert [(a.counted, a.max_tokens) for a in asks] == [(False, WARM_TOKENS), (True, 50), (True, 50)]
        assert all(a.fixed and bool(a.prediction) == (name == "edit") for a in asks)
    assert len({a.ids for asks in found.values() for a in asks}) == 9
    (note,) = notes
    assert note.startswith("fim: ")


@pytest.mark.model
def test_a_session_is_warmed_in_full_and_its_answers_end_by_themselves(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = (False, True, True)
    made = [
        LoadRequest(f"fim/{i}", 50, ids=(i,), stop=("\n\n",), stop_ids=(7,), prediction=(), session="a", counted=c)
        for i, c in enumerate(counted)
    ]
    monkeypatch.setattr(module, "make_workload", lambda *given: Workload("fim", tuple((prompt,) for prompt in made)))
    found = peer_prompts(tokenizer, ("fim",), 2, 50, lambda line: None)["fim"]
    assert [(p.name, p.counted, p.max_tokens) for p in found] == [
        ("fim/0", False, 50), ("fim/1", True, 50), ("fim/2", True, 50),
    ]  # fmt: skip
    assert [(p.fixed, p.stop, p.stop_ids, p.session) for p in found] == [(False, ("\n\n",), (7,), "a")] * 3
