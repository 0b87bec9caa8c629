"""Trains a drafter: batches in a fixed order, the measured acceptance, checkpoints."""

from __future__ import annotations

import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from specdec.atomic_file import replacing
from specdec.training.collect import Say
from specdec.training.states import Rows, StateFile
from specdec.training.texts import Text, TrainingError, writing

MEASURED = 5  # positions whose acceptance is measured
SORTED = 64  # batches among whose texts those of similar lengths come together
SAVE_EVERY_S = 300.0
_MEASURED_TEXTS = 24  # for a progress line; all in the end


@dataclass(frozen=True, slots=True)
class TrainingRecipe:
    """What the weights depend on, apart from texts and target."""

    passes: int
    batch_tokens: int = 512
    rate: float = 1e-3  # of learning, at its peak
    warm_up: float = 0.05  # of the steps
    last_rate: float = 0.05  # of the peak
    weight_decay: float = 0.01
    clip: float = 1.0  # norm of the gradient, at most
    seed: int = 0


class Batch(NamedTuple):
    """Texts, padded at the end. S is the longest text's tokens less one."""

    features: Tensor  # float32 [texts, S, width]
    begin: Tensor  # int64 [texts, 1]: the first token
    following: Tensor  # int64 [texts, S]: the token after each slot's
    ids: Tensor  # int64 [texts, S, likeliest]: draft ids of the likeliest tokens after ``following``
    chances: Tensor  # float32, as ``ids``; 0: not in the draft's vocabulary, or padding
    first: Tensor  # int64 [texts]: the slot that predicts the first token behind one that the target has written
    slots: Tensor  # int64 [texts]: slots of each text

    def valid(self, step: int) -> Tensor:
        """bool [texts, S]: whether the slot has a prediction ``step`` tokens further on."""
        return torch.arange(self.following.shape[1], device=self.slots.device) < self.slots[:, None] - step


class BatchMaker:
    """Makes batches of texts and their states. target_ids: int64 [draft vocabulary], rising."""

    def __init__(self, states: StateFile, target_ids: NDArray[np.int64], vocab_size: int, device: torch.device) -> None:
        self._states, self._device = states, device
        self._draft_ids = np.full(vocab_size, -1, np.int64)
        self._draft_ids[target_ids] = np.arange(len(target_ids))

    def __call__(self, texts: Seq[Text], numbers: Seq[int]) -> Batch:
        """numbers: of the texts in the file of states."""
        read: list[Rows] = [self._states.rows(number) for number in numbers]
        slots, longest = [len(rows) - 1 for rows in read], max(len(rows) for rows in read)
        padded = np.zeros((len(read), longest), read[0].dtype)
        for row, rows in zip(padded, read, strict=True):
            row[: len(rows)] = rows
        ids = self._draft_ids[padded["ids"][:, 1:]]
        chances = np.where(ids >= 0, padded["chances"][:, 1:].astype(np.float32), 0)
        features = torch.from_numpy(padded["features"][:, :-1].copy()).view(torch.bfloat16)
        tokens = torch.from_numpy(padded["token"].astype(np.int64))
        parts = (
            features.float(), tokens[:, :1], tokens[:, 1:],
            torch.from_numpy(ids), torch.from_numpy(chances),
            torch.tensor([text.answer - 1 for text in texts]), torch.tensor(slots),
        )  # fmt: skip
        return Batch(*(part.to(self._device) for part in parts))


class Student(nn.Module, ABC):
    """A drafter that learns. Parameters that require no gradient stay as they are, and checkpoints leave them out."""

    @abstractmethod
    def loss(self, batch: Batch) -> Tensor:
        """Cross-entropy on the target's distribution."""

    @abstractmethod
    def hits(self, batch: Batch, steps: int) -> Iterator[Tensor]:
        """For each token of a drafted chain, whether it is the target's likeliest if those before it are.

        bool [texts, S] each, of the chain that begins behind ``following`` of each slot.
        """

    def learnt(self) -> dict[str, Tensor]:
        """What a checkpoint holds: parameters that are trained, and buffers."""
        named = self.named_parameters(remove_duplicate=False)
        fixed = {name for name, parameter in named if not parameter.requires_grad}
        return {name: value for name, value in self.state_dict().items() if name not in fixed}


@torch.no_grad()
def accepted(student: Student, batch: Batch, steps: int = MEASURED) -> tuple[Tensor, Tensor]:
    """By position of a drafted chain from a text's answer: how many likeliest tokens were proposed, those before them
    having been right, and how many of them were right; int64 [steps] each."""
    slots = torch.arange(batch.following.shape[1], device=batch.first.device)
    right = (slots >= batch.first[:, None]) & batch.valid(0)
    proposed, agreed = [], []
    for step, hit in enumerate(student.hits(batch, steps)):
        right = right & batch.valid(step)
        proposed.append(right.sum())
        right = right & hit
        agreed.append(right.sum())
    return torch.stack(proposed), torch.stack(agreed)


class Trainer:
    """Trains ``student`` on ``numbers`` of ``texts``; goes on from ``path`` if it is there.

    held_out: numbers of the texts that acceptance is measured on. key: what the weights depend on beside the recipe;
    ``data`` stands for the texts.

    ``first`` is the acceptance by position before the first step.

    Raises:
        TrainingError: ``path`` is damaged, or of another training.
    """

    def __init__(
        self, student: Student, make: BatchMaker, texts: Seq[Text], numbers: Seq[int], held_out: Seq[int],
        recipe: TrainingRecipe, key: Mapping[str, str | int], path: Path,
    ) -> None:  # fmt: skip
        self.student, self._make, self._texts = student, make, texts
        self._numbers, self._held_out, self._recipe, self._path = numbers, held_out, recipe, path
        self._key = {**asdict(recipe), **key}
        self._parameters = [parameter for parameter in student.parameters() if parameter.requires_grad]
        self._per_pass = len(self._order(0))
        self.n_steps = self._per_pass * recipe.passes
        self.step, self.seconds, self.tokens, self.loss = 0, 0.0, 0, math.nan
        self.first: list[float] = []
        self._optimiser = torch.optim.AdamW(
            self._parameters, recipe.rate, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
        )
        if path.exists():
            self._load()

    def run(self, say: Say, deadline_s: float = float("inf")) -> None:
        """Train to the end, or until `time.monotonic` passes ``deadline_s``; saves every `SAVE_EVERY_S` and at the end.

        Raises:
            TrainingError: the disk is full.
        """
        if self.step == 0:
            self.first = self.acceptance()
        saved = clock = time.monotonic()
        measured = self._shares(self._held_out[:_MEASURED_TEXTS])
        order, tokens, began = self._order(self.step // self._per_pass), self.tokens, clock
        while self.step < self.n_steps and clock < deadline_s:
            at = self.step % self._per_pass
            if at == 0:
                order = self._order(self.step // self._per_pass)
            self._learn(order[at])
            now = time.monotonic()
            self.seconds, clock = self.seconds + now - clock, now
            rate = (self.tokens - tokens) / max(clock - began, 1e-9)
            say(
                f"step {self.step:,} of {self.n_steps:,}: loss {self.loss:.3f}, {self.tokens:,} tokens, {rate:.0f}/s; "
                f"accepted on held-out text: {measured}"
            )
            if clock - saved > SAVE_EVERY_S:
                self.save()
                measured, saved = self._shares(self._held_out[:_MEASURED_TEXTS]), clock
        self.save()

    def acceptance(self, numbers: Seq[int] | None = None) -> list[float]:
        """The share of proposed tokens that are right, by position, on ``numbers`` (None: all held-out texts).

        [] if there are no texts.
        """
        chosen = self._held_out if numbers is None else numbers
        if not chosen:
            return []
        pairs = torch.zeros(2, MEASURED, dtype=torch.int64)
        for at in range(0, len(chosen), 4):
            part = chosen[at : at + 4]
            batch = self._make([self._texts[n] for n in part], part)
            pairs += torch.stack(accepted(self.student, batch)).cpu()
        proposed, agreed = pairs.tolist()
        return [right / max(of, 1) for of, right in zip(proposed, agreed, strict=True)]

    def _shares(self, numbers: Seq[int]) -> str:
        return " ".join(f"{share:.2f}" for share in self.acceptance(numbers)) or "no such text"

    def _order(self, which: int) -> list[list[int]]:
        """The batches of pass ``which``."""
        rng = random.Random(f"{self._recipe.seed} {which}")
        numbers = list(self._numbers)
        rng.shuffle(numbers)
        batches: list[list[int]] = []
        while numbers:
            cut = sum(np.cumsum([len(self._texts[n].tokens) for n in numbers]) < SORTED * self._recipe.batch_tokens) + 1
            near, numbers = sorted(numbers[:cut], key=lambda n: len(self._texts[n].tokens)), numbers[cut:]
            while near:
                count = max(1, self._recipe.batch_tokens // len(self._texts[near[-1]].tokens))
                batches.append(near[-count:])
                near = near[:-count]
        rng.shuffle(batches)
        return batches

    def _learn(self, numbers: Seq[int]) -> None:
        """One step of the optimiser."""
        recipe, done = self._recipe, self.step / self.n_steps
        decay = recipe.last_rate + (1 - recipe.last_rate) * (1 + math.cos(math.pi * done)) / 2
        warm = min(1.0, (self.step + 1) / (recipe.warm_up * self.n_steps))
        for group in self._optimiser.param_groups:
            group["lr"] = recipe.rate * warm * decay
        batch = self._make([self._texts[n] for n in numbers], numbers)
        loss = self.student.loss(batch)
        value = loss.item()
        if not math.isfinite(value):
            raise TrainingError(f"--target: the loss is {value} at step {self.step}; its states or logits overflow")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, recipe.clip)
        self._optimiser.step()
        self._optimiser.zero_grad()
        self.loss = value if math.isnan(self.loss) else 0.98 * self.loss + 0.02 * value
        self.step, self.tokens = self.step + 1, self.tokens + int(batch.slots.sum())

    def save(self) -> None:
        """Write the checkpoint; the one before stays until it is complete. Raises TrainingError if the disk is full."""
        state: dict[str, Any] = {
            "key": self._key, "module": self.student.learnt(), "optimiser": self._optimiser.state_dict(),
            "step": self.step, "seconds": self.seconds, "tokens": self.tokens, "loss": self.loss,
            "first": self.first,
        }  # fmt: skip
        with writing("--out", self._path):
            for rest in self._path.parent.glob(f".{self._path.name}.*"):  # of a training that was killed as it wrote
                rest.unlink()
            with replacing(self._path, 0o666) as file:
                torch.save(state, file)

    def _load(self) -> None:
        try:
            state = torch.load(self._path, map_location="cpu", weights_only=True)
            found = state["key"]
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise TrainingError(f"--out: {self._path} is damaged ({reason}); delete it to begin again") from None
        for name in sorted({*self._key, *found}):  # what is trained comes before the recipe, which depends on it
            then, now = found.get(name, "none"), self._key.get(name, "none")
            if then != now:
                what = "other texts" if name == "data" else f"{name} {then} instead of {now}"
                raise TrainingError(
                    f"--out: {self._path} is of a training with {what}; give another folder, or delete it"
                )
        self.student.load_state_dict(state["module"], strict=False)
        self._optimiser.load_state_dict(state["optimiser"])
        self.step, self.seconds, self.tokens, self.loss, self.first = (
            state[name] for name in ("step", "seconds", "tokens", "loss", "first")
        )
