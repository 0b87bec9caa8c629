"""`specdec train-head --kind model`: a small model learns the target's distributions, and drafts."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from specdec.cli.main import cli
from specdec.models.resolve import load_tokenizer
from specdec.training.card import TrainingResult, model_card
from specdec.training.draft_model import DraftModel
from specdec.training.states import StateFile
from specdec.training.texts import Text, TextSplit
from specdec.training.trainer import Batch, BatchMaker, accepted
from tests.draft.eagle3_checkpoint import head_config, head_tensors, write_head
from tests.models.tiny import VOCAB_SIZE, load_oracle, make_tiny_model, make_tiny_tokenizer
from tests.models.tiny_adapter import make_adapter
from tests.training.permuting_target import (
    CACHE,
    NEXT,
    PlainDecoder,
    check_drafts,
    kill_after_a_checkpoint,
    permuting_target,
    permuting_texts,
)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the target's vocabulary."""
    folder = tmp_path_factory.mktemp("draft")
    return make_tiny_model("qwen2", folder, num_hidden_layers=1, seed=5, initializer_range=0.05)


def words(data: Path, out: Path, draft: Path, *more: str) -> list[str]:
    return [
        "train-head", "--kind", "model", "--target", str(permuting_target()), "--draft", str(draft), "--out", str(out),
        "--data", str(data), "--tokens", "1", "--threads", "1", *more,
    ]  # fmt: skip


def run(data: Path, out: Path, draft: Path, *more: str) -> Result:
    result = CliRunner().invoke(cli, words(data, out, draft, *more))
    torch.set_num_threads(1)
    return result


def batch_of(folder: Path, texts: list[Text]) -> Batch:
    states = StateFile(folder, texts, 0, VOCAB_SIZE)
    states.fill(PlainDecoder(), lambda line: None)
    make = BatchMaker(states, np.arange(VOCAB_SIZE), VOCAB_SIZE, torch.device("cpu"))
    return make(texts, range(len(texts)))


def test_loss_and_hits_are_those_of_a_plain_computation(tmp_path: Path) -> None:
    """Text by text and without padding: the target's cross-entropy, and chains that the model writes itself."""
    texts = [permuting_texts(1, seed=n, length=length)[0] for n, length in enumerate((40, 48, 35))]
    batch, oracle, steps = batch_of(tmp_path, texts), load_oracle(permuting_target()), 3
    for token in range(64, 128, 3):  # errs after a third of the tokens
        oracle.lm_head.weight.data[NEXT[token]] *= -1
    student = DraftModel(copy.deepcopy(oracle), rank=0)
    total, rows, right = 0.0, 0, torch.zeros(2, steps, dtype=torch.int64)
    chances = torch.softmax(8 * torch.nn.functional.one_hot(torch.tensor(NEXT), VOCAB_SIZE).float(), -1)
    for text in texts:
        tokens = torch.from_numpy(text.tokens).long()
        with torch.no_grad():
            logits = oracle(input_ids=tokens[None]).logits[0, 1:]
        kept = chances[tokens[1:]].topk(32)
        total -= float((kept.values.half().float() * torch.log_softmax(logits, -1).gather(1, kept.indices)).sum())
        rows += len(logits)
        for at in range(text.answer, len(tokens)):
            chain = tokens[: at + 1]
            for step in range(min(steps, len(tokens) - at)):
                with torch.no_grad():
                    chosen = oracle(input_ids=chain[None]).logits[0, -1].argmax()
                right[0, step] += 1
                if chosen != NEXT[chain[-1]]:
                    break
                right[1, step] += 1
                chain = torch.cat((chain, chosen[None]))
    tolerance = {"rtol": 2e-2, "atol": 0.0}  # products in bfloat16 where the processor has them
    assert np.allclose(student.loss(batch).item(), total / rows, **tolerance)
    assert torch.stack(accepted(student, batch, steps)).tolist() == right.tolist()
    assert 0 < right[1, 2] < right[1, 1] < right[1, 0]


def test_logits_are_those_of_the_whole_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model whose attention matters: the first token, which has no slot, counts, and padding does not."""
    monkeypatch.setattr("specdec.training.draft_model.multiplies_bf16", lambda device: False)
    texts = [permuting_texts(1, seed=n, length=length)[0] for n, length in enumerate((40, 48))]
    batch, oracle = batch_of(tmp_path, texts), load_oracle(make_tiny_model("llama", tmp_path / "model"))
    with torch.no_grad():
        found = DraftModel(oracle, rank=0)._logits(batch, batch.valid(0))
        expected = [oracle(input_ids=torch.from_numpy(text.tokens).long()[None]).logits[0, 1:] for text in texts]
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-3, atol=1e-3)


def test_hits_follow_the_chain(tmp_path: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = permuting_texts(2, length=48)
    batch, student = batch_of(tmp_path, texts), DraftModel(load_oracle(draft), rank=0)
    slots = torch.arange(47)

    def logits(batch: Batch, valid: torch.Tensor) -> torch.Tensor:
        """Right but at slots 35 and 40."""
        ids = torch.where((slots == 35) | (slots == 40), 0, batch.ids[..., 0])
        return torch.nn.functional.one_hot(ids[valid], VOCAB_SIZE).float()

    monkeypatch.setattr(student, "_logits", logits)
    proposed, agreed = accepted(student, batch, 3)
    first = range(31, 47)
    alive = [[i for i in first if i + k < 47 and not {35, 40} & set(range(i, i + k))] for k in range(4)]
    assert proposed.tolist() == [2 * len([i for i in alive[k] if i + k < 47]) for k in range(3)]
    assert agreed.tolist() == [2 * len([i for i in alive[k] if i + k not in (35, 40)]) for k in range(3)]


def test_low_rank_trains_what_it_adds_and_nothing_else(tmp_path: Path, draft: Path) -> None:
    student, before = DraftModel(load_oracle(draft), rank=2), load_oracle(draft).state_dict()
    tied = make_tiny_model("qwen3", tmp_path / "tied")  # its output table is the embedding
    assert all(".0." in name for name in DraftModel(load_oracle(tied), rank=2).learnt())
    learnt = {name for name, parameter in student.named_parameters() if parameter.requires_grad}
    assert learnt == set(student.learnt())
    assert len(learnt) == 2 * 7  # q, k, v, o, gate, up, down
    batch = batch_of(tmp_path, permuting_texts(3))
    optimiser = torch.optim.SGD([p for p in student.parameters() if p.requires_grad], 1.0)
    for _ in range(2):  # the first step moves `up` alone
        student.loss(batch).backward()
        optimiser.step()
        optimiser.zero_grad()
    added = {name: value.detach().clone() for name, value in student.named_parameters() if name in learnt}
    make_tiny_tokenizer(tmp_path / "out")
    student.write(tmp_path / "out", load_tokenizer(str(draft), CACHE), "card")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == load_file(draft / "model.safetensors").keys()
    for name, value in found.items():
        stem = "model." + name.removesuffix("weight") + "parametrizations.weight.0."
        if stem + "up" in added:
            sum_ = before[name] + 2 * added[stem + "up"] @ added[stem + "down"]
            assert torch.equal(value, sum_.bfloat16()), name
            assert not torch.equal(value, before[name].bfloat16()), name
        else:
            assert torch.equal(value, before[name].bfloat16()), name


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 16])
def test_a_trained_draft_serves_also_after_a_kill(
    rank: int, data: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.training.session.FULL_RATE", 3e-3)
    more = ("--passes", "8", "--rank", str(rank))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    rates = "import specdec.training.session as s; s.FULL_RATE = 3e-3; s.LOW_RANK_RATE = 2e-2; "
    monkeypatch.setattr("specdec.training.session.LOW_RANK_RATE", 2e-2)
    result = run(data, whole, draft, *more)
    assert result.exit_code == 0, result.output
    kill_after_a_checkpoint(words(data, cut, draft, *more), cut, 0, rates)
    assert not (cut / "model.safetensors").exists()
    result = run(data, cut, draft, *more)
    assert result.exit_code == 0, result.output
    expected, found = (load_file(folder / "model.safetensors") for folder in (whole, cut))
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    card = (whole / "README.md").read_text().splitlines()
    before, after = (
        [float(x) for x in line.split("|")[2:-1]] for line in card if line.startswith(("| before", "| tra"))
    )
    assert before[0] < 0.1
    assert min(after[:3]) > 0.6, after
    check_drafts(whole, "model")


def test_a_card_without_held_out_text_claims_no_acceptance() -> None:
    result = TrainingResult(TextSplit(permuting_texts(3), [], 1), 2.0, 1_000, 36.0, "2 CPU threads", [], [])
    card = model_card("Draft", "specdec train-head", "About.", "--draft FOLDER", result)
    assert "Not measured: no text was held out." in card
    assert "| before" not in card
    assert "0.01 hours of training on 2 CPU threads, 10.00 hours a million tokens" in card


def test_what_cannot_work_is_said(data: Path, draft: Path, tmp_path: Path) -> None:
    def said(folder: Path, *more: str) -> str:
        result = run(data, tmp_path / "out", folder, *more)
        assert result.exit_code != 0
        return " ".join(result.output.split())

    other = make_tiny_model("llama", tmp_path / "other", vocab_size=400)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {
        {"a": "b", "b": "a"}.get(token, token): at for token, at in tokenizer["model"]["vocab"].items()
    }
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "has another vocabulary than the target; choose a model of its family" in said(other)
    assert "no such file" in said(tmp_path / "nowhere")
    masked = make_tiny_model("llama", tmp_path / "masked", pard_token=3)
    assert "is a parallel draft" in said(masked)
    width = json.loads((draft / "config.json").read_text())["hidden_size"]
    head = write_head(tmp_path / "head", head_config(380, 200), head_tensors(width, 380, 200))
    assert "is a feature head" in said(head)
    adapter = make_adapter(draft, tmp_path / "adapter")
    assert "is an adapter; merge it" in said(adapter)
    result = CliRunner().invoke(cli, ["train-head", "--kind", "model", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "--kind model needs the small model" in " ".join(result.output.split())
    run(data, tmp_path / "out", draft, "--passes", "1")
    assert "of a training with rank 16 instead of 4; give another folder" in said(draft, "--passes", "1", "--rank", "4")
