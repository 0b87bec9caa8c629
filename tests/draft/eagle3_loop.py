"""A target and a feature head stepped by hand, with pages, prefix cache and accepted trees as in the engine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from draft.head import HeadDrafter, HeadNetwork
from draft.head_checkpoint import load_head
from draft.protocol import DraftTask
from specdec.core.kv_cache import KvCacheManager
from specdec.core.sampling import Sampler, SequenceSampling
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree
from specdec.core.types import SamplingParams, StoppingParams
from specdec.models.decoder import Decoder, KvPool
from specdec.models.load import load_model
from tests.draft.eagle3_checkpoint import head_config, head_tensors, write_head
from tests.draft.eagle3_reference import Eagle3Reference, Slot
from tests.draft.helpers import make_sequence, sampled_by
from tests.kernels.natives import native_backend
from tests.models.tiny import VOCAB_SIZE, make_tiny_model
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch
from verify_kernels.reference.sampling import ReferenceSampling

LAYERS, HIDDEN, DRAFT_VOCAB, POSITIONS = 6, 64, 150, 512


class Loop:
    """Greedy decoding of a tiny target. In addition to the head's drafts, every tree has decoys and ``gift`` tokens of
    the target's own continuation, so that several are accepted, at slots that differ from their positions."""

    def __init__(self, folder: Path, pages: int = 12, max_rows: int = 48) -> None:
        target = folder / "target"
        if not target.exists():
            make_tiny_model("llama", target, num_hidden_layers=LAYERS)
        self.tensors = head_tensors(HIDDEN, VOCAB_SIZE, DRAFT_VOCAB)
        write_head(folder / "head", head_config(VOCAB_SIZE, DRAFT_VOCAB), self.tensors)
        model = load_model(str(target), dtype="fp32", cache_dir=folder / "cache")
        head = load_head(folder / "head", dtype="fp32", target=model.config, target_embed=model.weights.embed)
        self.decoder, self.truth = (
            Decoder(
                model.config, model.weights, native_backend(), KvPool(model.config, n), max_rows=96, max_logit_rows=96,
                max_positions=POSITIONS, aux_layers=head.config.aux_layers,
            )
            for n in (pages, 8)
        )  # fmt: skip
        pool = KvPool(head.config.model, pages)
        network = HeadNetwork(head, native_backend(), pool, max_rows=max_rows, max_positions=POSITIONS)
        self.drafter = HeadDrafter(network, Sampler(ReferenceSampling()))
        self.begun: set[Sequence] = set()  # the drafter gets calls for these alone
        self.kv = KvCacheManager(pages, prefix_cache=True, partial_blocks=False)

    def admit(self, prompt: list[int], *, begin: bool = True) -> Sequence:
        sequence = make_sequence(prompt)
        assert self.kv.admit(sequence) is not None
        if begin:
            self.drafter.begin(sequence)
            self.begun.add(sequence)
        return sequence

    def prefill(self, sequence: Sequence, chunk: int) -> None:
        """Compute all but the pending token."""
        while sequence.prefilling:
            tokens = sequence.tokens[sequence.n_computed : len(sequence.tokens) - 1][:chunk]
            entry = BatchEntry(tokens, list(range(-1, len(tokens) - 1)), sequence.n_computed, sequence.pages)
            self.decoder.forward(ForwardBatch.build([entry]), [])
            start, sequence.n_computed = sequence.n_computed, sequence.n_computed + len(tokens)
            self.kv.publish(sequence)
            if sequence in self.begun:
                self.drafter.features(sequence, start, self.decoder.aux_hidden_states[: len(tokens)])

    def task(self, sequence: Sequence, nodes: int = 5, depth: int = 5, width: int = 1) -> DraftTask:
        assert self.kv.ensure(sequence, len(sequence.tokens) + nodes)  # as the scheduler does before a proposal
        sampling = SequenceSampling(SamplingParams(temperature=0.0), StoppingParams(), 1, VOCAB_SIZE, (), [])
        return DraftTask(sampled_by(sequence, sampling), nodes, depth, width, "head")

    def step(self, sequence: Sequence, drafted: TokenTree | None, gift: int = 3) -> None:
        """Verify the drafted tree extended with decoys and bonus nodes, commit, and notify the drafter."""
        tree = drafted or TokenTree(sequence.tokens[-1])
        node = 0
        for token in self.continuation(sequence.tokens, gift):
            tree.add(node, (token + 1) % VOCAB_SIZE, -9.0, "decoy")  # numbered before: the path's slots diverge
            node = tree.add(node, token, -9.0, "gift")
        start, root = sequence.n_computed, len(sequence.tokens) - 1
        assert self.kv.ensure(sequence, root + len(tree))
        entry = BatchEntry(tree.tokens, tree.parents, start, sequence.pages)
        logits = self.decoder.forward(ForwardBatch.build([entry]), range(len(tree)))
        path, tokens = [0], [int(logits[0].argmax())]
        while (child := tree.child(path[-1], tokens[-1])) is not None:
            path.append(child)
            tokens.append(int(logits[child].argmax()))
        slots = [sequence.pages[s // PAGE_SIZE] * PAGE_SIZE + s % PAGE_SIZE for s in range(root, root + len(tree))]
        source, target = np.array([slots[n] for n in path], np.int64), np.array(slots[: len(path)], np.int64)
        self.decoder.move_kv(source, target)
        sequence.tokens += tokens
        sequence.n_computed = len(sequence.tokens) - 1
        self.kv.trim(sequence, len(sequence.tokens))
        self.kv.publish(sequence)
        self.drafter.features(sequence, start, self.decoder.aux_hidden_states[torch.tensor(path)])
        self.drafter.observe(sequence, tokens)

    def end(self, sequence: Sequence) -> None:
        self.kv.release(sequence)
        self.drafter.end(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Lose all pages, notify the drafter, and resume."""
        self.kv.release(sequence)
        sequence.n_computed = sequence.draft_computed = 0
        self.drafter.rewind(sequence)
        assert self.kv.admit(sequence) is not None

    def continuation(self, tokens: list[int], n: int) -> list[int]:
        """Return plain decode's continuation of ``tokens``."""
        out: list[int] = []
        logits, _ = self.plain(tokens)
        while len(out) < n:
            out.append(int(logits[-1].argmax()))
            entry = BatchEntry([out[-1]], [-1], len(tokens) + len(out) - 1, list(range(8)))
            logits = self.truth.forward(ForwardBatch.build([entry]), [0])
        return out

    def expected_chain(self, sequence: Sequence, depth: int, begin: int = 0) -> list[tuple[int, float]]:
        """The reference's greedy chain with log-probabilities; ``begin``: where the head's context starts."""
        reference, tokens = self.reference(), sequence.tokens
        _, features = self.plain(tokens)
        slots = reference.committed(tokens[begin:], features[begin:])
        chain: list[tuple[int, float]] = []
        while len(chain) < depth:
            chain.append(self._best(slots[-1]))
            slots.append(reference.slot(slots[-1].z, chain[-1][0], len(slots), slots))
        return chain

    def reference(self) -> Eagle3Reference:
        return Eagle3Reference(self.tensors)

    def _best(self, slot: Slot) -> tuple[int, float]:
        draft_id = int(slot.logits.argmax())
        return draft_id + int(self.tensors["d2t"][draft_id]), float(slot.logits.log_softmax(0)[draft_id])

    def plain(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Logits of the last token, and features of all, computed afresh."""
        features = []
        for low in range(0, len(tokens), 96):
            chunk = tokens[low : low + 96]
            entry = BatchEntry(chunk, list(range(-1, len(chunk) - 1)), low, list(range(8)))
            logits = self.truth.forward(ForwardBatch.build([entry]), [len(chunk) - 1])
            features.append(self.truth.aux_hidden_states[: len(chunk)].clone())
        return logits, torch.cat(features)
