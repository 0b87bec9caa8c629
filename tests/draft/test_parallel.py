"""The parallel drafter against transformers: logits at the masks, trees, and a KV cache in which no mask stays."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import random
import shutil
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.path_identity import PLAIN, BatchConditions, first_mismatches, run_conditions
from draft.parallel import POSITIONS, ParallelDrafter
from draft.protocol import DraftTask
from specdec.core.kv_cache import KvCacheManager
from specdec.core.sampling import Sampler, SequenceSampling
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree
from specdec.core.types import Request, SamplingParams, SpeculationMode, SpeculationParams, StoppingParams
from specdec.engine.build import build_parts
from specdec.engine.engine import EngineParts
from specdec.errors import ModelError
from specdec.models.decoder import Decoder, KvPool
from specdec.models.load import load_model
from tests.draft.helpers import make_sequence, sampled_by
from tests.draft.tiny_drafts import CACHE, finished, folders, fresh, kernels
from tests.engine.test_every_drafter import all_conditions
from tests.engine.test_path_identity import named, requests
from tests.engine.tiny_engine import drain, run_all, tiny_engine, tiny_parts, tokens_of

MASK, VOCAB, ROWS = 381, 384, 96


class Recording(ParallelDrafter):
    """Keeps the logits that its last trees were made from."""

    def _expand(self, growing: Any, logits: Tensor) -> Any:
        self.logits = logits.clone()
        return super()._expand(growing, logits)


@pytest.fixture
def drafter() -> Recording:
    loaded = load_model(str(folders()["target"]), dtype="fp32", cache_dir=CACHE.expanduser())
    config = dataclasses.replace(loaded.config, mask_token=MASK)
    decoder = Decoder(
        config, loaded.weights, kernels().backend(), KvPool(config, 120, torch.float32),
        max_rows=ROWS, max_logit_rows=ROWS, max_positions=500,
    )  # fmt: skip
    return Recording(decoder, Sampler(kernels().sampling), VOCAB)


@functools.cache
def oracle() -> Any:
    return AutoModelForCausalLM.from_pretrained(folders()["target"], dtype=torch.float32).eval()


def plain(tokens: Seq[int], positions: int = POSITIONS) -> Tensor:
    """The positions' logits from one forward of transformers over the text and the masks."""
    with torch.no_grad():
        return oracle()(torch.tensor([[*tokens, *[MASK] * (positions - 1)]])).logits[0, -positions:]


def sequences(kv: KvCacheManager, *texts: list[int], spare: int = 64) -> list[Sequence]:
    found = []
    for text in texts:
        found.append(make_sequence(text))
        assert kv.admit(found[-1]) is not None
        assert kv.ensure(found[-1], len(text) + spare)
    return found


def task(sequence: Sequence, nodes: int = 7, depth: int = 31, width: int = 1, **sampling: Any) -> DraftTask:
    params = SamplingParams(**({"temperature": 0.0, "seed": 5} | sampling))
    made = SequenceSampling(params, StoppingParams(), 5, VOCAB, (), sequence.tokens)
    return DraftTask(sampled_by(sequence, made), nodes, depth, width, "parallel")


def test_logits_at_masks_stay_those_of_a_plain_forward(drafter: Recording) -> None:
    rng, kv = random.Random(3), KvCacheManager(40, prefix_cache=False)
    texts = [[rng.randrange(300) for _ in range(n)] for n in (1, 61, 230)]
    batch = sequences(kv, *texts, spare=150)
    for round_ in range(12):
        now = batch if round_ % 3 else batch[:2]  # the third pauses, so that more of its tokens are pending
        trees = drafter.propose([task(one, nodes=20, width=2) for one in now])
        expected = torch.cat([plain(one.tokens) for one in now])
        error = torch.linalg.norm(drafter.logits - expected) / torch.linalg.norm(expected)
        assert error <= 1e-4, f"round {round_}"
        for one, tree in itertools.zip_longest(batch, trees):
            path = [] if tree is None else tree.path_tokens(rng.randrange(len(tree)))
            new = [*path, rng.randrange(300)]  # a part of the draft is accepted, and the target's own token follows
            one.tokens += new
            drafter.observe(one, new)
            if tree is not None:
                assert one.draft_computed == len(one.tokens) - len(new)


@pytest.mark.parametrize("growing", [11, 12, 13])
def test_a_text_that_is_read_beside_full_trees_is_read_soon(growing: int, drafter: Recording) -> None:
    """Twelve trees of eight rows fill every forward."""
    kv, forward, forwards = KvCacheManager(120, prefix_cache=False), drafter._decoder.forward, 0

    def counted(*args: Any, **more: Any) -> Tensor:
        nonlocal forwards
        forwards += 1
        assert forwards < 40
        return forward(*args, **more)

    drafter._decoder.forward = counted  # type: ignore[method-assign]
    *short, long = sequences(kv, *[[3 + i, 4, 5, 6] * 4 for i in range(growing)], [7, 8, 9, 10] * 50)
    reads = DraftTask(long, 0, 0, 1, "parallel", prefill=150)
    trees = drafter.propose([*(task(one, nodes=20) for one in short), reads])
    assert long.draft_computed == 150
    assert all(len(tree) > 1 for tree in trees[:-1])


def paths(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.path_tokens(node)) for node in range(1, len(tree))}


@pytest.mark.parametrize(("nodes", "depth", "width"), [(1, 9, 3), (14, 31, 3), (31, 4, 4), (40, 31, 2)])
def test_the_tree_has_the_likeliest_paths(drafter: Recording, nodes: int, depth: int, width: int) -> None:
    (one,) = sequences(KvCacheManager(40, prefix_cache=False), [5, 9, 13, 17] * 8)
    (tree,) = drafter.propose([task(one, nodes, depth, width)])
    best = torch.log_softmax(plain(one.tokens).double(), -1).topk(width)
    chances = {}
    for length in range(1, min(depth, 6) + 1):
        for ranks in itertools.product(range(width), repeat=length):
            path = tuple(int(best.indices[at, rank]) for at, rank in enumerate(ranks))
            chances[path] = sum(float(best.values[at, rank]) for at, rank in enumerate(ranks))
    expected = sorted(chances, key=lambda path: -chances[path])[:nodes]
    assert max(map(len, expected)) < 6 or depth < 6  # longer paths could not be among them
    assert paths(tree) == set(expected)
    for node in range(1, len(tree)):
        assert tree.scores[node] == pytest.approx(chances[tuple(tree.path_tokens(node))], abs=1e-3)


@pytest.mark.parametrize("edits", [{}, {"frequency_penalty": 3.0, "allowed_token_ids": tuple(range(20, 26))}])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_chain_is_what_the_target_would_choose_by_these_logits(
    drafter: Recording, temperature: float, edits: dict[str, Any]
) -> None:
    (one,) = sequences(KvCacheManager(40, prefix_cache=False), [5, 9, 13, 17] * 8)
    (tree,) = drafter.propose([task(one, temperature=temperature, **edits)])
    chain: list[int] = []
    for row in plain(one.tokens)[:7]:
        at = one.sampling.row(len(one.tokens) + len(chain), chain, len(chain))
        chain += [token for token, _ in drafter._sampler.sample(row[None], [at])]
    assert tree.path_tokens(7) == chain
    assert len(set(chain)) > 2


@pytest.mark.parametrize(("batch", "depth"), [(3, 8), (20, 4), (60, 1)])
def test_positions_fit_the_forward(drafter: Recording, batch: int, depth: int) -> None:
    kv = KvCacheManager(120, prefix_cache=False)
    found = sequences(kv, *([n, n + 1] * (1 + n % 40) for n in range(batch)), spare=9)
    for tree, one in zip(drafter.propose([task(one, 20) for one in found]), found, strict=True):
        assert tree.tokens[1:] == plain(one.tokens, depth).argmax(-1).tolist()


def test_masks_stay_within_the_pages(drafter: Recording) -> None:
    (one,) = sequences(KvCacheManager(40, prefix_cache=False), list(range(62)), spare=2)
    (tree,) = drafter.propose([task(one)])
    assert max(tree.depths) == 3  # the last token is in slot 61, and two slots remain


def marked(folder: Path, source: Path, mark: Any = MASK) -> str:
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text()) | {"pard_token": mark, "spd_type": "pard"}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@functools.cache
def parallel_parts(twin: bool) -> EngineParts:
    """The tiny engine with a marked draft; twin: the draft has the target's weights, so that first tokens are right."""
    base = tiny_parts()
    source = Path(base.config.target if twin else base.config.draft or "")
    draft = marked(source.parent / f"marked-{twin}", source)
    speculation = base.config.speculation.model_copy(update={"max_depth": 31})
    return build_parts(
        base.config.model_copy(update={"draft": draft, "draft_dtype": "int8", "speculation": speculation})
    )


def test_a_marked_draft_runs_as_parallel_and_can_be_swapped() -> None:
    parts = parallel_parts(False)
    assert parts.info.drafters == ("suffix", "parallel")
    engine = tiny_engine(parts)
    ask = Request("a", (5, 6, 7), SamplingParams(temperature=0.0), StoppingParams(max_tokens=30, ignore_eos=True),
                  speculation=SpeculationParams(SpeculationMode.ON))  # fmt: skip
    expected = tokens_of(run_all(tiny_engine(tiny_parts()), [ask]), "a")
    engine.submit(ask)
    events = []
    for draft, names in ((tiny_parts().config.draft, ("model",)), (parts.config.draft, ("parallel",)), (None, ())):
        events += [event for _ in range(4) for event in engine.step()]
        engine.swap_draft(None if draft is None else engine.load_draft(draft, None))
        assert engine.info().drafters[1:] == names
    assert tokens_of(events + drain(engine), "a") == expected


def test_a_marked_draft_of_another_vocabulary_drafts_token_by_token(tmp_path: Path) -> None:
    draft = marked(tmp_path / "draft", folders()["other"], 3)
    parts = build_parts(tiny_parts().config.model_copy(update={"draft": draft}))
    assert parts.info.drafters == ("suffix", "model")


@pytest.mark.parametrize("mark", [-1, VOCAB, True, "5", 1.0])
def test_a_bad_mark_is_refused(tmp_path: Path, mark: Any) -> None:
    draft = marked(tmp_path / "draft", Path(tiny_parts().config.draft or ""), mark)
    with pytest.raises(ModelError, match="'pard_token' must be a token below 384"):
        load_model(draft, dtype="int8", cache_dir=tmp_path)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_first_token_of_a_twin_is_always_right(temperature: float) -> None:
    """It would not be if KV of masks, or of rejected tokens, remained."""
    engine = fresh(parallel_parts(True))
    wish = SpeculationParams(SpeculationMode.ON, (("model", "parallel")[temperature > 0],), 6, 6, 1)
    for i in range(3):
        prompt = tuple((7 * j + i) % 300 for j in range(150 + 40 * i))
        params = SamplingParams(temperature=temperature, seed=7, allowed_token_ids=tuple(range(300)))
        engine.submit(
            Request(f"r{i}", prompt, params, StoppingParams(max_tokens=61, ignore_eos=True), speculation=wish)
        )
    for _ in range(3):
        for _ in range(9):
            engine.step()
        engine.preempt_newest()
    for done in finished(engine):
        accepted, steps = done.stats.num_accepted_draft_tokens, 61 - done.stats.num_accepted_draft_tokens
        assert done.stats.num_draft_tokens > 2 * accepted  # others are wrong, and their KV must not stay
        assert accepted >= steps - 2  # all but the first step and, where one token is left to emit, the last one


@settings(max_examples=25)
@given(
    drawn=st.lists(requests, min_size=1, max_size=5),
    conditions=all_conditions,
    drafters=st.sampled_from([("parallel",), ("suffix", "parallel")]),
    twin=st.booleans(),
)
def test_no_token_depends_on_it(
    drawn: list[Request], conditions: BatchConditions, drafters: tuple[str, ...], twin: bool
) -> None:
    parts, conditions = parallel_parts(twin), dataclasses.replace(conditions, drafters=drafters)
    expected = run_conditions(parts, PLAIN, named(drawn))
    mismatches = first_mismatches(conditions.name, expected, run_conditions(parts, conditions, named(drawn)))
    assert not mismatches, mismatches[0]
