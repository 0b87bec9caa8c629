"""An engine whose target is sharded over processes: the same tokens and log-probabilities, dead ranks, and errors."""

from __future__ import annotations

import dataclasses
import gc
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from bench.path_identity import BatchConditions, ConditionsRunner, first_mismatches, make_requests
from bench.workloads.workload import long_text
from specdec.config import EngineConfig, SpeculationConfig
from specdec.core.kv_cache import KvCacheManager
from specdec.core.types import Pooling, Request, SamplingParams, StoppingParams
from specdec.engine.build import build_parts
from specdec.engine.engine import Engine, EngineParts
from specdec.errors import ConfigError, ModelError
from specdec.models.tensor_parallel.parallel_decoder import ParallelDecoder
from tests.engine.tiny_engine import drain, finish_of, run_all
from tests.models.tiny import make_tiny_model
from verify_kernels.cpu.shared_ranks import RankLostError
from verify_kernels.forward_batch import BatchEntry, ForwardBatch

CACHE = Path("~/.cache/specdec")
CONDITIONS = (
    BatchConditions("plain", concurrency=4, prefill_chunk=7, warm=True),
    BatchConditions("trees", ("suffix", "model"), 10, 5, 3, concurrency=4, preempt_every=4, prefill_chunk=20),
)


def tiny_config(target: str, tp: int, **fields: Any) -> EngineConfig:
    speculation = fields.pop("speculation", SpeculationConfig(drafters=("suffix",), profile_s=0))
    return EngineConfig(
        target=target, tp=tp, threads=2, kv_tokens=64 * 40, max_batch=8, max_step_rows=96, prefill_chunk=64,
        max_context=448, speculation=speculation, **({"cache_dir": CACHE} | fields),
    )  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineParts, EngineParts]]:
    """The same model alone and over three processes, with a draft model of its vocabulary."""
    folder = cache_in(tmp_path_factory.mktemp("tp"))
    target = make_tiny_model("qwen2", folder / "target", head_dim=32, hidden_size=128, num_key_value_heads=4)
    draft = make_tiny_model("llama", folder / "draft", seed=5)
    speculation = SpeculationConfig(drafters=("suffix", "model"), profile_s=0.0)
    alone, cut = (
        build_parts(
            tiny_config(str(target), tp, draft=str(draft), cache_dir=folder, kv_dtype="int8", speculation=speculation)
        )
        for tp in (1, 3)
    )
    yield alone, cut
    assert isinstance(cut.decoder, ParallelDecoder)
    cut.decoder.close()


def cache_in(folder: Path) -> Path:
    """A separate cache, except for the kernels, which take long to build."""
    (folder / "kernels").symlink_to(CACHE.expanduser() / "kernels")
    return folder


def ranks_of(parts: EngineParts) -> list[psutil.Process]:
    assert isinstance(parts.decoder, ParallelDecoder)
    return [psutil.Process(rank.process.pid) for rank in parts.decoder._others._ranks]


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_tokens_and_logprobs_equal_those_of_one_process(two: tuple[EngineParts, EngineParts]) -> None:
    alone, cut = two
    requests = list(make_requests(alone.tokenizer, 14, seed=3, max_tokens=16))
    requests = [request for request in requests if len(request.prompt_ids) < 400]
    expected = ConditionsRunner(alone).run(BatchConditions("alone", prefix_cache=False), requests)
    for conditions in CONDITIONS:
        outcomes = ConditionsRunner(cut).run(conditions, requests)
        assert not first_mismatches(conditions.name, expected, outcomes)
    assert sum(outcome.accepted for outcome in outcomes.values()) > 20  # KV was moved, on all ranks
    assert cut.info.numeric_fingerprint == alone.info.numeric_fingerprint


def test_embeddings_equal_those_of_one_process(two: tuple[EngineParts, EngineParts]) -> None:
    found = []
    for parts in two:
        requests = [
            Request(pooling, tuple(range(3, 90)), stopping=StoppingParams(max_tokens=0), pooling=pooling)
            for pooling in Pooling
        ]
        events = run_all(Engine(dataclasses.replace(parts, kv=KvCacheManager(8, prefix_cache=True))), requests)
        found.append([finish_of(events, pooling).embedding for pooling in Pooling])
    assert found[0] == found[1]


def test_a_rank_holds_its_share_only(two: tuple[EngineParts, EngineParts]) -> None:
    alone, cut = two
    whole, own = alone.decoder.weights, cut.decoder._own.weights  # type: ignore[attr-defined]
    assert own.nbytes < 0.4 * whole.nbytes
    assert own.embed.shape == whole.embed.shape  # looked up for all
    assert (cut.info.tp, cut.info.threads) == (3, 3)


def test_a_rejected_batch_affects_no_other(two: tuple[EngineParts, EngineParts]) -> None:
    engine = Engine(two[1])
    with pytest.raises(ValueError, match="tokens"):
        two[1].decoder.forward(ForwardBatch.build([BatchEntry([10**6], [-1], 0, [1])]), [0])
    engine.submit(Request("r", (1, 2, 3), SamplingParams(temperature=0.0), StoppingParams(max_tokens=3)))
    while engine.has_work():
        engine.step()


def test_a_dead_rank_ends_the_engine() -> None:
    cut = build_parts(tiny_config("random:tiny", 2))  # of no file: its weights reach the ranks through memory
    engine, (rank,) = Engine(cut), ranks_of(cut)
    endless = StoppingParams(max_tokens=400, ignore_eos=True)
    engine.submit(Request("r", (1, 2, 3), SamplingParams(temperature=0.0), endless))
    for _ in range(3):
        engine.step()
    rank.send_signal(signal.SIGKILL)
    with pytest.raises(RankLostError, match=rf"rank 1, process {rank.pid}: killed by signal 9"):
        drain(engine)
    with pytest.raises(RankLostError):
        engine.step()  # and it stays ended
    with pytest.raises(RankLostError, match="killed by signal 9"):
        engine.load()  # by which an idle one is found out
    assert gone(rank)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp": 3}, r"engine.tp: 3 processes, but the model's hidden_size 64 is only 2 tiles of 32 rows; set it to 2"),
        ({"tp": 2, "kernels": "reference"}, r"engine.tp: reference kernels do not run over processes; set it to 1"),
        (
            {"tp": 2, "device": "cuda"},
            r"engine.tp: only a CPU's target is cut over processes; set it to 1, or .*device",
        ),
    ],
)
def test_an_indivisible_model_is_rejected(fields: dict[str, Any], message: str) -> None:
    others = psutil.Process().children()
    with pytest.raises(ConfigError, match=message):
        build_parts(tiny_config("random:tiny", **fields))
    assert psutil.Process().children() == others


def test_damaged_weights_are_packed_again_and_ranks_end_with_the_decoder(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", cache_in(tmp_path) / "m", head_dim=32)
    build_parts(tiny_config(str(folder), 1, cache_dir=tmp_path))
    (packed,) = (tmp_path / "packed").glob("*.packed")
    data = bytearray(packed.read_bytes())
    data[-5000] ^= 1
    packed.write_bytes(data)
    with pytest.raises(ModelError, match=r"packed weights were damaged .* start again"):
        build_parts(tiny_config(str(folder), 2, cache_dir=tmp_path))
    parts = build_parts(tiny_config(str(folder), 2, cache_dir=tmp_path))
    (rank,) = ranks_of(parts)
    rank.send_signal(signal.SIGTERM)  # a terminal sends such to all of a group, of which the first decides
    rank.send_signal(signal.SIGINT)
    Engine(parts).load()
    assert not gone(rank)
    del parts
    gc.collect()
    assert gone(rank)  # with the decoder


def test_a_rank_that_cannot_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.models.tensor_parallel.parallel_decoder.asdict", lambda sizes: {"max_rows": 1})
    with pytest.raises(ModelError, match=r"engine.tp: rank 1 could not start: TypeError"):
        build_parts(tiny_config("random:tiny", 2))


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1200)
def test_smollm2_gives_the_same_tokens_on_one_two_and_four_ranks() -> None:
    found = []
    for tp in (1, 2, 4):
        config = EngineConfig(
            target="smollm2-135m", tp=tp, threads=2, kv_tokens=2048, speculation=SpeculationConfig(enabled=False)
        )
        parts = build_parts(config)
        tokens = parts.tokenizer.encode(long_text())[:280]
        chunks = ((0, 190), (190, 272))
        logits = [
            parts.decoder.forward(
                ForwardBatch.build(
                    [BatchEntry(tokens[low:high], list(range(-1, high - low - 1)), low, [3, 0, 4, 2, 1])]
                ),
                range(high - low),
            ).clone()
            for low, high in chunks
        ]
        tree = BatchEntry(tokens[272:280], [-1, 0, 0, 1, 1, 2, 5, 6], 272, [3, 0, 4, 2, 1])
        logits.append(parts.decoder.forward(ForwardBatch.build([tree]), range(8)).clone())
        found.append(torch.cat(logits))
        if isinstance(parts.decoder, ParallelDecoder):
            parts.decoder.close()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
