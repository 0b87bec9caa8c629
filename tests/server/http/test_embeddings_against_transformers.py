"""Texts and documents against transformers: prompt, end token, pooling, and the chance of yes against no."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedTokenizerFast

from server.http import embeddings
from server.http.call import Call
from server.http.embeddings import INSTRUCTION, Reranker
from server.json_body import Body
from specdec.config import EngineConfig, SpeculationConfig
from specdec.core.types import Request, RequestEvent
from specdec.engine.build import build_served_engine
from specdec.errors import ViolationCollector
from tests.engine.tiny_engine import run_all
from tests.models.embedders import make_embedder, make_reranker

TEXTS = ["The quick brown fox", "def add(first, second):\n    return first", "yes or no?", "a <|im_end|> inside"]
HEAD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
TAIL = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class Stream:
    """The events of a request that has run."""

    def __init__(self, events: list[RequestEvent]) -> None:
        self._events = events

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def __aiter__(self) -> AsyncIterator[RequestEvent]:
        for event in self._events:
            yield event

    def close(self) -> None:
        pass


class LocalModel:
    """What embeddings use of a `ServedModel`, over an engine in this process."""

    def __init__(self, folder: Path) -> None:
        config = EngineConfig(
            target=str(folder), dtype="fp32", kv_dtype="fp32", threads=2, kv_tokens=64 * 40,
            speculation=SpeculationConfig(drafters=("none",), profile_s=0), cache_dir=Path("~/.cache/specdec"),
        )  # fmt: skip
        self._engine = build_served_engine(config)
        self.loaded = self._engine._parts.tokenizer
        self.info, self.admission, self.tokenizer = self._engine.info(), self, self

    async def encode(self, text: str, **options: Any) -> list[int]:
        return self.loaded.encode(text, **options)

    def admit(self, caller: object, request: Request, key: str = "", *, asks_again: bool = False) -> Stream:
        return Stream(run_all(self._engine, [request]))


def local(folder: Path) -> Call:
    return cast(Call, SimpleNamespace(model=LocalModel(folder), request_id="r", supersedes_key="", field_names={}))


@pytest.mark.parametrize("flag", ["pooling_mode_lasttoken", "pooling_mode_mean_tokens"])
async def test_texts_equal_transformers(flag: str, tmp_path: Path) -> None:
    call, body = local(make_embedder(tmp_path / "m", flag)), Body({}, ViolationCollector())
    prompts = [await embeddings.embedded_ids(call.model, text) for text in TEXTS]
    found, tokens = await embeddings.embeddings(call, body, "input", TEXTS, "e", {}, dimensions=16)
    assert tokens == sum(map(len, prompts))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "m" / "tokenizer.json"), split_special_tokens=True
    )
    oracle = AutoModel.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    for text, ids, values in zip(TEXTS, prompts, found, strict=True):
        if "<|" not in text:
            assert list(ids) == tokenizer(text).input_ids
        with torch.no_grad():
            states = oracle(torch.tensor([ids])).last_hidden_state[0]
        expected = (states[-1] if "last" in flag else states.mean(0))[:16].double().numpy()
        assert values @ expected / np.linalg.norm(expected) >= 0.9999
        assert np.linalg.norm(values) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("tops", [20, 0], ids=["among the likeliest", "generated again"])
async def test_scores_equal_transformers(tops: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "MAX_LOGPROBS", tops)
    call = local(make_reranker(tmp_path / "tiny-reranker"))
    reranker = Reranker(call)
    scores, tokens = await reranker.scores(await reranker.requests("a query", TEXTS, INSTRUCTION, {}))
    tokenizer = call.model.tokenizer.loaded
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny-reranker", dtype=torch.float32).eval()
    expected, lengths = [], 0
    for text in TEXTS:
        body = f"<Instruct>: {INSTRUCTION}\n<Query>: a query\n<Document>: {text}"
        parts = [
            tokenizer.encode(part, parse_special=special)
            for part, special in ((HEAD, True), (body, False), (TAIL, True))
        ]
        ids = [token for part in parts for token in part]
        lengths += len(ids)
        with torch.no_grad():
            logits = oracle(torch.tensor([ids])).logits[0, -1, [reranker.no, reranker.yes]]
        expected.append(logits.double().softmax(0)[1].item())
    assert scores == pytest.approx(expected, abs=1e-3)
    assert max(expected) - min(expected) > 0.01
    assert tokens == lengths
