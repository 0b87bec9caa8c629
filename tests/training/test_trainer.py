"""Training of heads: the module against inference, resumed runs against undisturbed ones, the file of states."""

from __future__ import annotations

import errno
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from draft.head import HeadNetwork
from draft.head_checkpoint import load_head
from specdec.models.config import ModelConfig, RopeConfig
from specdec.models.decoder import KvPool
from specdec.training.head_files import TargetTables, config_json, draft_vocabulary, new_head, write_head
from specdec.training.head_module import HeadModule
from specdec.training.states import StateFile
from specdec.training.texts import TextSplit, TrainingError
from specdec.training.trainer import BatchMaker, Trainer, TrainingRecipe, accepted
from tests.kernels.natives import native_backend
from tests.models.tiny import VOCAB_SIZE
from tests.training.permuting_target import NEXT, PlainDecoder, permuting_texts
from verify_kernels.forward_batch import BatchEntry, ForwardBatch

HIDDEN, POSITIONS = 24, 80
TARGET = ModelConfig("llama", VOCAB_SIZE, HIDDEN, 8, 4, 2, 8, 40, 512, 1e-5, RopeConfig(10000.0), 8**-0.5)


def make_head(target_ids: np.ndarray, features: torch.Tensor | None = None, target: ModelConfig = TARGET) -> HeadModule:
    decoder = PlainDecoder(HIDDEN)
    tables = TargetTables(decoder.embed, decoder.embed[np.argsort(NEXT)], torch.ones(HIDDEN))
    if features is None:
        features = torch.randn(64, 3 * HIDDEN, generator=torch.Generator().manual_seed(3))
    return new_head(target, tables, target_ids, features, POSITIONS)


def make_trainer(
    folder: Path, passes: int = 3, count: int = 30, key: Mapping[str, str | int] = {"data": "data"}, **recipe: float
) -> Trainer:
    texts, decoder = permuting_texts(count), PlainDecoder(HIDDEN)
    folder.mkdir(exist_ok=True)
    states = StateFile(folder, texts, 3 * HIDDEN, VOCAB_SIZE)
    states.fill(decoder, lambda line: None)
    ids = draft_vocabulary(TextSplit(texts, [], 0).token_counts(VOCAB_SIZE))
    make = BatchMaker(states, ids, VOCAB_SIZE, torch.device("cpu"))
    plan = replace(TrainingRecipe(passes, batch_tokens=200), **recipe)  # type: ignore[arg-type]
    numbers = list(range(4, count))
    return Trainer(make_head(ids), make, texts, numbers, range(4), plan, key, folder / "checkpoint.pt")


def test_a_head_of_experts_is_as_wide_as_those_that_a_token_uses() -> None:
    head = make_head(np.arange(64), target=replace(TARGET, family="qwen3_moe", experts=8, experts_per_token=3))
    assert (head.config.experts, head.config.intermediate_size) == (0, 120)
    assert config_json(head.config, "x", 64, [])["intermediate_size"] == 120


def test_the_module_predicts_what_inference_does(tmp_path: Path) -> None:
    """At every slot, for the committed prefix and for each step of a chain that begins there."""
    head, steps = make_head(np.arange(0, VOCAB_SIZE, 3)), 4
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4)) * 0.2)
            parameter.copy_(parameter.bfloat16())
        head.feature_scale.fill_(0.5)
    write_head(tmp_path, head, np.arange(0, VOCAB_SIZE, 3), config_json(head.config, "x", 128, [0.5]), "")
    embed = PlainDecoder(HIDDEN).embed
    loaded = load_head(tmp_path, dtype="fp32", target=TARGET, target_embed=embed)
    network = HeadNetwork(
        loaded, native_backend(), KvPool(loaded.config.model, 4), max_rows=POSITIONS, max_positions=128
    )
    (text,) = permuting_texts(1, length=70)
    tokens, pages = text.tokens.tolist(), [2, 1]
    features = torch.randn(len(tokens), 3 * HIDDEN, generator=torch.Generator().manual_seed(5))
    following = torch.tensor(tokens[1:])
    with torch.no_grad():
        states = head.unroll(features[None, :-1], embed[following][None], steps)
        expected = [head.lm_head(state[0]) for state in states]
    slots = len(tokens) - 1
    fused = network.fuse(features[:slots]).clone()
    batch = ForwardBatch.build([BatchEntry(tokens[1:], list(range(-1, slots - 1)), 0, pages)])
    network.forward(batch, fused, [])
    for slot in range(slots - steps, -1, -1):  # backwards: a chain overwrites the slots behind its own
        hidden = [fused[slot]]
        for step in range(steps):
            fed = tokens[slot + 1 : slot + 2 + step]
            batch = ForwardBatch.build([BatchEntry(fed, list(range(-1, step)), slot, pages)])
            logits, z = network.forward(batch, torch.stack(hidden), [step])
            torch.testing.assert_close(logits[0, ::3], expected[step][slot], atol=2e-4, rtol=2e-4)
            hidden.append(z[0].clone())


def test_acceptance_rises_from_chance_on_held_out_text(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, passes=8, count=80, rate=5e-3)
    before, lines = trainer.acceptance(), list[str]()
    trainer.run(lines.append)
    after = trainer.acceptance()
    assert before[0] < 0.1
    assert min(after[:3]) > 0.6, after
    assert f"step {trainer.n_steps:,} of {trainer.n_steps:,}: loss " in lines[-1]
    assert "accepted on held-out text: 0.0" in lines[-1]  # from the run's begin: none was saved since
    resumed = make_trainer(tmp_path, passes=8, count=80, rate=5e-3)
    resumed.run(lines.append)
    assert (resumed.first, resumed.acceptance()) == (before, after)


def test_acceptance_counts_chains_up_to_their_first_error(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    batch = trainer._make([trainer._texts[0]], [0])
    right = {}
    head = trainer.student
    assert isinstance(head, HeadModule)

    def lm_head(state: torch.Tensor) -> torch.Tensor:
        """Right everywhere, but for every second slot at the second step."""
        step = len(right)
        ids = batch.ids[..., 0].roll(-step, 1).clone()
        if step == 1:
            ids[:, ::2] = -1
        right[step] = ids
        return torch.nn.functional.one_hot(ids.clamp(min=0), head.lm_head.out_features) * (ids >= 0)[..., None]

    head.lm_head.forward = lm_head  # type: ignore[method-assign]
    proposed, agreed = accepted(head, batch, 3)
    slots, first = 47, 31
    assert proposed.tolist() == [slots - first, slots - first - 1, (slots - first - 1) // 2]
    assert agreed.tolist() == [slots - first, (slots - first) // 2 - 0, (slots - first - 1) // 2]


def test_without_held_out_text_nothing_is_measured(tmp_path: Path) -> None:
    trainer, lines = make_trainer(tmp_path, passes=1), list[str]()
    trainer._held_out = []
    trainer.run(lines.append)
    assert trainer.first == trainer.acceptance() == []
    assert "accepted on held-out text: no such text" in lines[-1]


def test_interrupted_training_ends_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ended at five random moments: between steps, and while a checkpoint is written."""
    monkeypatch.setattr("specdec.training.trainer.SAVE_EVERY_S", 0.0)
    whole = make_trainer(tmp_path / "whole")
    whole.run(lambda line: None)
    rng, ends = random.Random(0), 0

    class Killed(BaseException):
        pass

    while True:
        trainer = make_trainer(tmp_path / "cut")
        moment, count = rng.randint(1, trainer.n_steps // 3), [0]

        def end(*unused: object, moment: int = moment, count: list[int] = count) -> None:
            count[0] += 1
            if count[0] == moment:
                raise Killed

        with monkeypatch.context() as patch:
            if ends % 2:
                patch.setattr("os.fsync", end)
            try:
                trainer.run((lambda line: None) if ends % 2 else end)
                break
            except Killed:
                ends += 1
    assert ends >= 3
    assert trainer.step == whole.step > 10
    for (name, expected), found in zip(
        whole.student.state_dict().items(), trainer.student.state_dict().values(), strict=True
    ):
        assert torch.equal(expected, found), name


def test_checkpoints_of_other_trainings_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    make_trainer(tmp_path, passes=1).run(lambda line: None)
    with pytest.raises(TrainingError, match="a training with passes 1 instead of 2; give another folder"):
        make_trainer(tmp_path, passes=2)
    with pytest.raises(TrainingError, match="a training with draft none instead of small; give another folder"):
        make_trainer(tmp_path, passes=1, rate=0.5, key={"data": "data", "draft": "small"})  # of another kind
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(TrainingError, match=r"checkpoint.pt is damaged \(.*delete it to begin again"):
        make_trainer(tmp_path, passes=1)


def test_a_checkpoint_that_does_not_fit_leaves_the_disk_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    before = set(tmp_path.iterdir())
    with pytest.raises(TrainingError, match=r"No space left on device.*free some space or choose another"):
        trainer.save()
    assert set(tmp_path.iterdir()) == before


def test_bug_a_checkpoint_that_a_killed_training_left_unfinished_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*unused: object) -> None:
        raise KeyboardInterrupt

    trainer = make_trainer(tmp_path)
    trainer.save()
    before = set(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", killed)
        patch.setattr("os.unlink", killed)  # nothing runs after a kill
        with pytest.raises(KeyboardInterrupt):
            trainer.save()
    assert len(set(tmp_path.iterdir()) - before) == 1
    make_trainer(tmp_path).save()
    assert set(tmp_path.iterdir()) == before


def test_states_cut_anywhere_are_completed(tmp_path: Path) -> None:
    texts = permuting_texts(7, length=40)
    (tmp_path / "whole").mkdir()
    whole = StateFile(tmp_path / "whole", texts, 3 * HIDDEN, VOCAB_SIZE)
    whole.fill(PlainDecoder(HIDDEN), lambda line: None)
    data = (tmp_path / "whole" / "states.bin").read_bytes()
    folder = tmp_path / "cut"
    folder.mkdir()
    for size in range(0, len(data), len(data) // 11):
        (folder / "states.bin").write_bytes(data[:size])
        states, decoder = StateFile(folder, texts, 3 * HIDDEN, VOCAB_SIZE), PlainDecoder(HIDDEN)
        assert states.n_texts == size * 7 // len(data)
        states.fill(decoder, lambda line: None)
        assert decoder.calls == -(-(7 - size * 7 // len(data)) // 2)  # two texts at a time, none twice
        assert (folder / "states.bin").read_bytes() == data
    with pytest.raises(TrainingError, match="not of the texts beside it; delete it"):
        StateFile(folder, permuting_texts(7, seed=1, length=40), 3 * HIDDEN, VOCAB_SIZE)


def test_the_draft_vocabulary_covers_the_frequent_tokens() -> None:
    counts = np.zeros(1000, np.int64)
    counts[[5, 900, 7]] = 500, 480, 20
    counts[100:170] = 1
    assert draft_vocabulary(counts).tolist() == sorted([5, 7, 900, *range(100, 161)])
