"""The model drafter, in engines whose draft is the target, and alone; `test_twins` has more of the former."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from typing import Any

import numpy as np
import pytest

from draft.model import TAIL_PAGES, TAIL_TOKENS, ModelDrafter
from draft.protocol import DraftTask
from specdec.control.inputs import TreeExpansion
from specdec.core.kv_cache import KvCacheManager
from specdec.core.sampling import Sampler, SequenceSampling
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree
from specdec.core.types import SamplingParams, SpeculationParams, StoppingParams
from specdec.engine.engine import Engine
from specdec.models.fim import FimParser
from specdec.models.load import load_model
from specdec.models.vocabulary_cut import VocabularyCut
from tests.core.kv_cache.invariants import check_pages
from tests.draft.helpers import make_sequence, sampled_by
from tests.draft.test_twins import SAME, same_parts
from tests.draft.tiny_drafts import (
    CACHE,
    decoder,
    decoder_of,
    finished,
    folders,
    forced,
    kernels,
    model,
    own_drafter,
    rejected,
    wordy_tokenizer,
)
from tests.models.tiny import SPECIALS
from verify_kernels.forward_batch import BatchEntry, ForwardBatch


def test_a_prefix_that_the_draft_never_computed_is_computed() -> None:
    engine = SAME.engine()
    prompt = tuple(range(5, 155))
    quiet = Engine(dataclasses.replace(same_parts(), drafters=[], kv=engine._kv))
    quiet.submit(SAME.ask("a", prompt, speculation=SpeculationParams()))
    finished(quiet)
    engine.submit(SAME.ask("b", prompt))
    done = finished(engine)
    assert done[0].usage.cached_tokens == 149
    assert rejected(done) == 0


def test_pages_run_out() -> None:
    engine = SAME.engine(pages=6)
    for i in range(4):
        engine.submit(SAME.ask(f"r{i}", tuple(range(5 + i, 65 + i)), max_tokens=130))
    done = finished(engine)
    assert sum(event.usage.preemptions for event in done) > 0
    assert rejected(done, 100) == 0
    check_pages(engine._kv, [])


def test_late_drafting_prefills_the_missed_tokens() -> None:
    """A sequence is decoded for long without this drafter, which then runs: the whole output is its pending prefill."""
    drafter, tokens, sampling = lone_drafter(), [(5 * i) % 300 for i in range(333)], greedy()
    sequence = make_sequence(tokens)
    kv = KvCacheManager(40, prefix_cache=False)
    assert kv.admit(sequence) is not None
    kv.ensure(sequence, len(tokens) + 16)
    assert drafter.pending_prefill(sequence) == 333
    tree = propose(drafter, [DraftTask(sampled_by(sequence, sampling), 8, 8, 1, "model")])[0]
    assert drafter.pending_prefill(sequence) == 1
    assert tree.tokens[1:] == plain(tokens, 8)
    drafter.end(sequence)  # without a commit, as after a failed step
    assert sequence not in drafter._drafted


TAILS = 3  # texts that the drafter of the following tests can read without their starts


def tail_drafter(fim: Any = None) -> ModelDrafter:
    """A drafter with pages 28 and up for texts without their starts."""
    pages = range(28, 28 + TAILS * TAIL_PAGES)
    return ModelDrafter(decoder("target"), Sampler(kernels().sampling), 384, tail_pages=pages, fim=fim)


def paged_sequence(kv: KvCacheManager, tokens: list[int]) -> Sequence:
    sequence = sampled_by(make_sequence(tokens), greedy())
    assert kv.admit(sequence) is not None
    return sequence


def chain(
    drafter: ModelDrafter, kv: KvCacheManager, sequence: Sequence, tail: bool = True, depth: int = 5
) -> list[int]:
    """The drafted chain."""
    kv.ensure(sequence, len(sequence.tokens) + depth + 1)
    (tree,) = propose(drafter, [DraftTask(sequence, depth, depth, 1, "model", tail=tail)])
    return tree.tokens[1:]


def commit(drafter: ModelDrafter, sequence: Sequence, tokens: list[int]) -> None:
    sequence.tokens += tokens
    drafter.observe(sequence, tokens)


def test_a_text_without_its_start_is_continued_from_its_end() -> None:
    """Also while another sequence with the same pages reads the whole text, whose KV stays as it is."""
    drafter, kv, text = tail_drafter(), KvCacheManager(28, prefix_cache=True), [(5 * i) % 300 for i in range(200)]
    short, whole = paged_sequence(kv, text), paged_sequence(kv, text)
    assert (drafter.pending_prefill(short), drafter.tail_prefill(short)) == (200, TAIL_TOKENS)
    read = text[-TAIL_TOKENS:]
    for right in (5, 0, 3, 5):
        assert chain(drafter, kv, whole, tail=False) == plain(text, 5)
        found = chain(drafter, kv, short)
        assert found == plain(read, 5)
        new = [*found[:right], 7]
        commit(drafter, short, new)
        read += new
        assert drafter.tail_prefill(short) == 1 + (right == 5)
        drafter.rewind(whole)
    assert short.draft_computed == 0  # no other sequence takes its KV for that of the whole text
    drafter.rewind(short)
    assert chain(drafter, kv, short) == plain(read, 5)
    assert chain(drafter, kv, short, tail=False) == plain(short.tokens, 5)
    assert drafter.pending_prefill(short) == 1


def test_a_text_without_its_start_begins_again_where_too_much_is_missing_or_its_pages_are_full() -> None:
    drafter, kv, text = tail_drafter(), KvCacheManager(28, prefix_cache=False), [(5 * i) % 300 for i in range(100)]
    sequence = paged_sequence(kv, text)
    read = text[-TAIL_TOKENS:]
    assert chain(drafter, kv, sequence) == plain(read, 5)
    missed = [(11 * i) % 300 for i in range(2 * TAIL_TOKENS + 1)]
    commit(drafter, sequence, missed)
    restarts = []
    for i in range(30):
        if drafter.tail_prefill(sequence) == TAIL_TOKENS:
            read = sequence.tokens[-TAIL_TOKENS:]
            restarts.append(i)
        assert chain(drafter, kv, sequence) == plain(read, 5)
        new = [(3 * i + j) % 300 for j in range(20)]
        commit(drafter, sequence, new)
        read = read + new
    assert restarts == [0, 9, 18, 27]  # 256 slots have room for 32 tokens, eight times twenty more, and a tree


def test_pages_for_texts_without_their_starts_run_out_and_return() -> None:
    drafter, kv = tail_drafter(), KvCacheManager(28, prefix_cache=False)
    sequences = [paged_sequence(kv, [(n * i) % 300 for i in range(80)]) for n in range(3, 4 + TAILS)]
    tasks = [DraftTask(sequence, 3, 3, 1, "model", tail=True) for sequence in sequences]
    for sequence in sequences:
        kv.ensure(sequence, 90)
    assert [len(tree) for tree in propose(drafter, tasks)] == [4] * TAILS + [1]
    assert [task.begun for task in tasks] == [True] * TAILS + [False]
    last = sequences.pop()
    assert drafter.tail_prefill(last) == drafter.pending_prefill(last) == 80
    drafter.end(sequences[0])
    assert drafter.tail_prefill(last) == TAIL_TOKENS
    assert chain(drafter, kv, last) == plain(last.tokens[-TAIL_TOKENS:], 5)


def test_a_text_without_its_start_is_prefilled_in_pieces() -> None:
    drafter, kv, text = tail_drafter(), KvCacheManager(28, prefix_cache=False), [(5 * i) % 300 for i in range(100)]
    sequence = paged_sequence(kv, text)
    for left in (20, 8):
        assert len(propose(drafter, [DraftTask(sequence, 0, 0, 1, "model", prefill=12, tail=True)])[0]) == 1
        assert drafter.tail_prefill(sequence) == left
    assert chain(drafter, kv, sequence) == plain(text[-TAIL_TOKENS:], 5)


def test_the_text_before_the_cursor_is_read_where_a_prompt_fills_a_gap() -> None:
    tokenizer = wordy_tokenizer(("a",), (*SPECIALS, "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"))
    prefix, suffix, middle = (tokenizer.token_id(f"<|fim_{name}|>") for name in ("prefix", "suffix", "middle"))
    drafter, kv = tail_drafter(FimParser(tokenizer)), KvCacheManager(28, prefix_cache=False)
    before, after = [i % 97 for i in range(70)], [i % 89 for i in range(50)]
    sequence = paged_sequence(kv, [prefix, *before, suffix, *after, middle, 9, 5])
    assert chain(drafter, kv, sequence) == plain([*before, 9, 5][-TAIL_TOKENS:], 5)
    empty = paged_sequence(kv, [prefix, suffix, *after, *after, middle, 5])
    assert chain(drafter, kv, empty) == plain([5], 5)


def test_accepted_drafts_are_not_prefilled_again() -> None:
    engine = SAME.engine()
    drafter = own_drafter(same_parts())
    engine.submit(SAME.ask("a", tuple(range(5, 60)), speculation=forced(5, 5)))
    (sequence,) = engine._requests.live["a"]
    amounts = set()
    while engine.has_work():
        before = sequence.n_output
        engine.step()
        if sequence.n_output - before == 6 and not sequence.ending:
            amounts.add(drafter.pending_prefill(sequence))
    assert amounts == {2}  # the chain's leaf, and the target's own token


def test_a_long_text_is_prefilled_in_chunks() -> None:
    """The other sequence of the batch is drafted for, and none of its rows is lost."""
    drafter, kv = lone_drafter(), KvCacheManager(40, prefix_cache=False)
    tasks = []
    for text in ([(5 * i) % 300 for i in range(333)], [(7 * i) % 300 for i in range(130)]):
        sequence = make_sequence(text)
        assert kv.admit(sequence) is not None
        kv.ensure(sequence, len(text) + 16)
        tasks.append(DraftTask(sampled_by(sequence, greedy()), 5, 5, 1, "model"))
    long, short = tasks
    left = []
    while (pending := drafter.pending_prefill(long.sequence)) > 60:
        left.append(pending)
        trees = propose(drafter, [DraftTask(long.sequence, 0, 0, 1, "model", prefill=60), short])
        assert len(trees[0]) == 1
        assert trees[1].tokens[1:] == plain(short.sequence.tokens, 5)
    assert left == [333, 273, 213, 153, 93]
    assert propose(drafter, [long])[0].tokens[1:] == plain(long.sequence.tokens, 5)


def test_many_batch_sizes() -> None:
    drafter, kv = lone_drafter(), KvCacheManager(40, prefix_cache=False)
    texts = [[(5 * i + n) % 300 for i in range(length)] for n, length in enumerate((1, 200, 97, 96, 1, 95, 30))]
    tasks = []
    for text in texts:
        sequence = make_sequence(text)
        assert kv.admit(sequence) is not None
        kv.ensure(sequence, len(text) + 16)
        tasks.append(DraftTask(sampled_by(sequence, greedy()), 5, 5, 1, "model"))
    for tree, text in zip(propose(drafter, tasks), texts, strict=True):
        assert tree.tokens[1:] == plain(text, 5)


def test_caps_are_obeyed() -> None:
    drafter, kv = lone_drafter(), KvCacheManager(40, prefix_cache=False)
    sequence = make_sequence(list(range(30)))
    kv.admit(sequence)
    kv.ensure(sequence, 128)
    for nodes, depth, width in [(0, 5, 2), (5, 0, 2), (1, 1, 1), (20, 3, 2), (7, 7, 16), (63, 63, 4)]:
        (tree,) = propose(drafter, [DraftTask(sampled_by(sequence, greedy()), nodes, depth, width, "model")])
        assert len(tree) - 1 <= nodes
        assert max(tree.depths) <= depth
        assert all(tree.parents.count(node) <= width for node in range(len(tree)))
        if nodes and depth:
            assert len(tree) - 1 >= min(nodes, depth)


def test_floors_are_obeyed() -> None:
    drafter, kv = lone_drafter(), KvCacheManager(40, prefix_cache=False)
    sequence = make_sequence(list(range(30)))
    kv.admit(sequence)
    kv.ensure(sequence, 128)
    floor, level_floor = math.log(0.05), math.log(0.2)
    expansion = TreeExpansion(None, 0.0, [0.0], 1.0, level_floor)
    (tree,) = propose(
        drafter,
        [
            DraftTask(
                sampled_by(sequence, greedy()),
                40,
                20,
                3,
                "model",
                floor=floor,
                expansion=expansion,
            )
        ],
    )
    assert 1 < len(tree) < 41
    assert min(tree.scores) >= floor
    assert all(tree.scores[parent] >= level_floor for parent in tree.parents[1:])


def test_tokens_that_the_target_may_not_generate_are_not_proposed() -> None:
    drafter, kv = lone_drafter(), KvCacheManager(40, prefix_cache=False)
    sequence = make_sequence(list(range(30)))
    kv.admit(sequence)
    kv.ensure(sequence, 128)
    allowed = (3, 50, 51, 300)
    params = SamplingParams(temperature=0.0, allowed_token_ids=allowed)
    sampling = SequenceSampling(
        params, StoppingParams(min_tokens=2, stop_token_ids=(3,)), 1, 384, (2,), sequence.tokens
    )
    (tree,) = propose(drafter, [DraftTask(sampled_by(sequence, sampling), 40, 4, 16, "model")])
    assert set(tree.tokens[1:]) <= set(allowed)
    assert {tree.depths[node] for node in range(len(tree)) if tree.tokens[node] == 3} <= {3, 4}
    assert len(tree) > 8


def test_a_token_beyond_the_drafts_vocabulary_affects_only_its_request() -> None:
    engine = SAME.engine()
    drafter = own_drafter(same_parts())
    full = drafter._decoder.config
    drafter._decoder.config = dataclasses.replace(full, vocab_size=300)
    try:
        engine.submit(SAME.ask("odd", (350, 5, 6, 7), max_tokens=9))
        engine.submit(SAME.ask("fine", tuple(range(5, 105))))
        done = {event.request_id: event for event in finished(engine)}
    finally:
        drafter._decoder.config = full
    assert done["odd"].stats.num_draft_tokens == 0
    assert done["fine"].stats.num_draft_tokens > 0


@cache
def _lone() -> ModelDrafter:
    return ModelDrafter(decoder("target"), Sampler(kernels().sampling), decoder("target").config.vocab_size)


def lone_drafter() -> ModelDrafter:
    """A drafter outside any engine. Its pool keeps the content of earlier tests."""
    return _lone()


def propose(drafter: ModelDrafter, tasks: list[DraftTask]) -> list[TokenTree]:
    return drafter.propose(tasks)


def greedy() -> SequenceSampling:
    return SequenceSampling(SamplingParams(temperature=0.0), StoppingParams(), 1, 384, (), (1,))


@cache
def _plain_decoder() -> Any:
    return decoder("target", rows=400)


def plain(tokens: list[int], count: int) -> list[int]:
    """Return the tokens that the model generates, each from a forward over the whole text."""
    text = list(tokens)
    for _ in range(count):
        entry = BatchEntry(text, list(range(-1, len(text) - 1)), 0, list(range(8)))
        logits = _plain_decoder().forward(ForwardBatch.build([entry]), [len(text) - 1])
        text.append(int(np.argmax(logits.numpy()[0])))
    return text[len(tokens) :]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("edited", [False, True])
def test_tokens_outside_a_truncated_table_are_not_proposed(temperature: float, edited: bool) -> None:
    """As if only the others were allowed: the same tree, noise and chances."""
    ids = np.arange(3, 300, 2, dtype=np.int32)
    loaded = model("target")
    cut = VocabularyCut(loaded.tokenizer.fingerprint, ids)
    small = load_model(str(folders()["target"]), dtype="int8", cache_dir=CACHE.expanduser(), cut=cut)
    drafter = ModelDrafter(
        decoder_of(small), Sampler(kernels().sampling), loaded.config.vocab_size, small.weights.output_ids
    )
    sequence = make_sequence(list(range(30)))
    kv = KvCacheManager(40, prefix_cache=False)
    kv.admit(sequence)
    kv.ensure(sequence, 128)
    bias = ((5, 1.5),) if edited else ()

    def tree(drafter: ModelDrafter, allowed: tuple[int, ...]) -> TokenTree:
        params = SamplingParams(temperature=temperature, seed=5, allowed_token_ids=allowed, logit_bias=bias)
        sampling = SequenceSampling(params, StoppingParams(), 5, 384, (), sequence.tokens)
        sequence.draft_computed = 0
        return propose(drafter, [DraftTask(sampled_by(sequence, sampling), 24, 4, 3, "model")])[0]

    found, expected = tree(drafter, ()), tree(lone_drafter(), tuple(ids.tolist()))
    assert len(found) > 8
    assert (found.tokens, found.parents) == (expected.tokens, expected.parents)
    assert found.scores == pytest.approx(expected.scores, abs=1e-5)  # a token that cannot win has no weight
