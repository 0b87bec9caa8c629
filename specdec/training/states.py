"""The target's hidden states and likeliest next tokens at every token of the texts, in one flat file.

To compute them again in every pass would cost more than half of the training's time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.training.collect import AT_ONCE, Say
from specdec.training.texts import ROOM, Text, TrainingError
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch

LIKELIEST = 32  # tokens kept of the target's distribution at a position

Rows = NDArray[np.void]
"""A text's rows: ``token``; ``features``, bfloat16 bits of the hidden states; ``ids`` and ``chances`` of the likeliest
next tokens, best first."""


class StateFile:
    """Appends rows in the order of ``texts``. A text counts once all of its rows are written.

    width: of the features; 0: they are left out, for a student that reads tokens alone.

    Raises:
        TrainingError: the file does not belong to these texts.
    """

    def __init__(self, folder: Path, texts: Seq[Text], width: int, vocab_size: int) -> None:
        likeliest = (min(LIKELIEST, vocab_size),)
        self._row = np.dtype(
            [("token", "<i4"), ("features", "<u2", (width,)), ("ids", "<i4", likeliest), ("chances", "<f2", likeliest)]
        )
        self._path, self._texts = folder / ("states.bin" if width else "likeliest.bin"), texts
        self._ends = np.cumsum([0, *(len(text.tokens) for text in texts)])
        size = self._path.stat().st_size if self._path.exists() else 0
        self.n_texts = int(np.searchsorted(self._ends, size // self._row.itemsize, side="right")) - 1
        for number in {0, self.n_texts - 1} if self.n_texts else ():
            self.rows(number)

    @property
    def n_tokens(self) -> int:
        """Tokens of the texts that are complete."""
        return int(self._ends[self.n_texts])

    def rows(self, number: int) -> Rows:
        """The rows of a complete text, from the file."""
        low, high = (int(end) for end in self._ends[number : number + 2])
        offset = low * self._row.itemsize
        rows = np.fromfile(self._path, self._row, high - low, offset=offset)
        if not np.array_equal(rows["token"], self._texts[number].tokens):
            raise TrainingError(f"--data: {self._path} is not of the texts beside it; delete it, and run again")
        return rows

    def fill(self, decoder: Any, say: Say, deadline_s: float = float("inf")) -> None:
        """Compute the rows of the texts that have none, until `time.monotonic` passes ``deadline_s``.

        decoder: the target's, with a head's ``aux_layers``; its KV cache is overwritten.

        Raises:
            TrainingError: the disk is full.
        """
        began, before = time.monotonic(), self.n_tokens
        try:
            with self._path.open("ab") as file:
                file.truncate(self.n_tokens * self._row.itemsize)
                for group in self._groups(decoder.max_rows):
                    if time.monotonic() >= deadline_s:
                        break
                    file.write(self._compute(decoder, group).tobytes())
                    file.flush()
                    self.n_texts += len(group)
                    rate = (self.n_tokens - before) / max(time.monotonic() - began, 1e-9)
                    say(f"hidden states: {self.n_tokens:,} of {self._ends[-1]:,} tokens, {rate:.0f}/s")
                os.fsync(file.fileno())
        except OSError as error:
            place = f"{self._path} of {self._row.itemsize * int(self._ends[-1]) / 2**30:.1f} GiB"
            raise TrainingError(f"--data: {place} cannot be written ({error}); {ROOM}") from None

    def _groups(self, max_rows: int) -> Iterator[list[Text]]:
        """The texts without rows, as many at a time as a forward takes."""
        group: list[Text] = []
        for text in self._texts[self.n_texts :]:
            if len(group) == AT_ONCE or sum(len(t.tokens) for t in group) + len(text.tokens) > max_rows:
                yield group
                group = []
            group.append(text)
        if group:
            yield group

    def _compute(self, decoder: Any, texts: Seq[Text]) -> Rows:
        entries, page = [], 0
        for text in texts:
            n = len(text.tokens)
            pages = range(page, page + -(-n // PAGE_SIZE))
            entries.append(BatchEntry(text.tokens.tolist(), list(range(-1, n - 1)), 0, pages))
            page = pages.stop
        batch = ForwardBatch.build(entries)
        best = torch.topk(torch.softmax(decoder.forward(batch, range(batch.rows)), -1), self._row["ids"].shape[0])
        rows = np.empty(batch.rows, self._row)
        rows["token"] = batch.tokens
        if rows["features"].size:
            features = decoder.aux_hidden_states[: batch.rows].bfloat16().cpu()
            rows["features"] = features.view(torch.uint16).numpy()
        rows["ids"], rows["chances"] = best.indices.cpu().numpy(), best.values.cpu().numpy()
        return rows
