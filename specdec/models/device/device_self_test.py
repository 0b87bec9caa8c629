"""Start-up self-test: do the kernels on this very GPU give a row the same bits in any company?"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.models.device.device_decoder import DeviceDecoder
from verify_kernels.forward_batch import BatchEntry, ForwardBatch
from verify_kernels.self_test import NumericMode

PROMPT = 66  # tokens: a page and two
PARENTS = (-1, 0, 1, 1, 0, 4, 5)
CHUNKS = (1, 2, 7)  # the rest comes at once


def device_self_test(decoder: DeviceDecoder) -> NumericMode:
    """A prompt at once and a tree above it, against the prompt in pieces and each node's path one row at a time;
    "bitwise" when no bit of the logits differs. Writes to the pool's first two pages, which nobody may use yet."""
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randint(0, decoder.config.vocab_size, (PROMPT + len(PARENTS),), generator=generator)
    prompt, tree = drawn[:PROMPT].tolist(), drawn[PROMPT:].tolist()
    at_once = _prompt(decoder, prompt, [min(PROMPT, decoder.max_logit_rows)], [0, 1])
    nodes = _rows(decoder, BatchEntry(tree, PARENTS, PROMPT, [0, 1]))
    same = all(map(torch.equal, at_once, _prompt(decoder, prompt, list(CHUNKS), [1, 0])))
    return "bitwise" if same and all(map(torch.equal, nodes, _paths(decoder, tree, [1, 0]))) else "numerical"


def _prompt(decoder: DeviceDecoder, tokens: list[int], sizes: list[int], pages: list[int]) -> list[Tensor]:
    done, found = 0, []
    while done < len(tokens):
        size = sizes.pop(0) if sizes else decoder.max_logit_rows
        chunk = tokens[done : done + size]
        found += _rows(decoder, BatchEntry(chunk, range(-1, len(chunk) - 1), done, pages))
        done += len(chunk)
    return found


def _paths(decoder: DeviceDecoder, tokens: list[int], pages: list[int]) -> list[Tensor]:
    found = []
    for node in range(len(tokens)):
        path = [node]
        while PARENTS[path[0]] >= 0:
            path.insert(0, PARENTS[path[0]])
        for depth, at in enumerate(path):
            (row,) = _rows(decoder, BatchEntry([tokens[at]], [-1], PROMPT + depth, pages))
        found.append(row)
    return found


def _rows(decoder: DeviceDecoder, entry: BatchEntry) -> list[Tensor]:
    """Logits of each row."""
    return list(decoder.forward(ForwardBatch.build([entry]), range(len(entry.tokens))).clone())
