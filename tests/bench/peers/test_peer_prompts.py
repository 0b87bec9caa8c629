"""The prompts of all engines: number, lengths and warm-ups."""

from __future__ import annotations

import pytest

from bench.peers import peers_session as module
from bench.peers.peers_session import WARM_TOKENS, peer_prompts
from bench.workloads.workload import BenchPrompt, Workload
from specdec.config import EngineConfig
from specdec.core.types import StoppingParams
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
    assert [(p.workload, p.counted) for p in found] == [
        (name, counted) for name in ("humaneval", "edit", "chat") for counted in (False, True, True)
    ]
    assert [p.ask.max_tokens for p in found] == [WARM_TOKENS, 50, 50] * 3
    assert all(p.ask.fixed for p in found)
    assert len({p.ask.ids for p in found}) == len(found)
    assert [bool(p.ask.prediction) for p in found] == [p.workload == "edit" for p in found]
    (note,) = notes
    assert note.startswith("fim: ")


@pytest.mark.model
def test_a_session_is_warmed_in_full_and_its_answers_end_by_themselves(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = StoppingParams(max_tokens=50, stop=("\n\n",), stop_token_ids=(7,))
    counted = (False, True, True, True, False, True)
    made = [BenchPrompt(f"fim/{i}", (i,), ends, session="abcdef"[i // 4], counted=c) for i, c in enumerate(counted)]
    monkeypatch.setattr(module, "make_workload", lambda *given: Workload("fim", tuple((prompt,) for prompt in made)))
    found = peer_prompts(tokenizer, ("fim",), 2, 50, lambda line: None)
    assert [(p.ask.name, p.counted, p.ask.max_tokens) for p in found] == [
        ("fim/0", False, 50), ("fim/1", True, 50), ("fim/2", True, 50),
    ]  # fmt: skip
    assert [(p.ask.fixed, p.ask.stop, p.ask.stop_ids, p.ask.session) for p in found] == [
        (False, ("\n\n",), (7,), "a")
    ] * 3
