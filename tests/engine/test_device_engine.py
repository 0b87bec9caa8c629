"""The engine with its target on the device: the same tokens as the CPU, in any batch conditions."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from bench.path_identity import PLAIN, BatchConditions, Outcome, first_mismatches, run_conditions
from draft.model import ModelDrafter
from draft.parallel import ParallelDrafter
from specdec.config import EngineConfig, SpeculationConfig
from specdec.core.kv_cache import KvCacheManager
from specdec.core.sampling import Sampler, SequenceSampling
from specdec.core.types import (
    GrammarKind,
    GrammarParams,
    OutputParams,
    Pooling,
    Request,
    SamplingParams,
    StoppingParams,
)
from specdec.engine import build, build_device, device_verify, step
from specdec.engine.build import assemble, build_parts
from specdec.engine.build_device import DevicePlatform, build_device_decoder, device_kv_dtype, device_needs
from specdec.engine.device_verify import POLICIES, RUNS, TOP, DeviceOutputs, DeviceVerifier, warm_up
from specdec.engine.engine import Engine, EngineParts
from specdec.engine.memory import MemoryBudget
from specdec.engine.platform import target_device
from specdec.engine.verify import StepRows
from specdec.errors import ConfigError, ModelError
from specdec.models import device_weights
from specdec.models.device_decoder import DeviceDecoder, DeviceNetwork
from specdec.models.device_step import HostMirror
from specdec.models.device_weights import DeviceTypes
from specdec.models.random_model import RANDOM_SHAPES
from specdec.models.weights import linear_plans
from tests.engine.fan_drafter import FanDrafter
from tests.engine.tiny_engine import failures, finish_of, run_all, tokens_of
from tests.kernels.gpu.no_host_read import NoHostRead
from tests.kernels.gpu.quick_interpreter import quick_interpreter
from tests.kernels.gpu.recorded_launches import recorded_launches
from tests.models.device.small import FLOAT32, SLOW_INTERPRETED, TINY, device_model, place
from verify_kernels.backend_selection import load_kernels
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch
from verify_kernels.gpu.sampling_table import SamplingNeeds, SamplingPlan, SamplingWorkspace
from verify_kernels.reference.sampling import ReferenceSampling
from verify_kernels.sampling import RowSampling, SamplingPolicy

NAME = "small-heads-of-64"
SMALL = dataclasses.replace(TINY, n_layers=1)
SHORT = StoppingParams(max_tokens=3, ignore_eos=True)
FANNED = BatchConditions("fans, all at once", ("fan",), 7, 4, 3, concurrency=4, prefill_chunk=37, preempt_every=3)


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_interpreter(), mock.patch.dict(RANDOM_SHAPES, {NAME: SMALL}):
        yield


def config(**changes: Any) -> EngineConfig:
    speculation = SpeculationConfig(drafters=("none",), profile_s=0)
    sizes: dict[str, Any] = {"kv_tokens": 64 * 12, "max_batch": 4, "max_step_rows": 64, "prefill_chunk": 32}
    return EngineConfig(
        target=f"random:{NAME}", cache_dir=Path("~/.cache/specdec"), max_context=256, threads=1, dtype="fp32",
        kernels="reference", **{"speculation": speculation, **sizes, **changes},
    )  # fmt: skip


def built(settings: EngineConfig) -> EngineParts:
    """Parts on the tests' device. The self-test has its own tests."""
    with mock.patch.object(build_device, "device_self_test", return_value="bitwise"):
        kernels = load_kernels("reference", settings.cache_dir, 1)
        return assemble(settings, DevicePlatform(settings, place()), kernels, 1)


@functools.cache
def device_parts(kv_dtype: str = "auto") -> EngineParts:
    parts = built(config(device_dtype="fp16", kv_dtype=kv_dtype))
    return dataclasses.replace(parts, drafters=[FanDrafter(SMALL.vocab_size)])


def make_request(name: str, length: int, tokens: int = 5, **fields: Any) -> Request:
    stopping = fields.pop("stopping", StoppingParams(max_tokens=tokens, ignore_eos=True))
    prompt = tuple(7 * i % 250 for i in range(length))
    return Request(name, prompt, SamplingParams(**fields.pop("sampling", {"temperature": 0.0})), stopping, **fields)


REQUESTS = [
    make_request("greedy", 66, output=OutputParams(logprobs=3)),
    make_request("sampled", 5, sampling={"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 5}),
    make_request("edited", 9, sampling={
        "temperature": 0.6, "seed": 3, "repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": ((9, 2.0),),
    }, output=OutputParams(logprobs=0)),
    make_request("grammar", 3, grammar=GrammarParams(GrammarKind.REGEX, "[a-d]+x?"),
        sampling={"temperature": 1.0, "seed": 8}, stopping=SHORT),
]  # fmt: skip


@functools.cache
def plain(name: str, kv_dtype: str = "auto") -> Outcome:
    """The answer to one of ``REQUESTS`` alone, by plain decode."""
    with quick_interpreter():
        selected = [request for request in REQUESTS if request.request_id == name]
        return run_conditions(device_parts(kv_dtype=kv_dtype), PLAIN, selected)[name, 0]


@pytest.mark.parametrize(
    ("names", "kv_dtype", "accepted"),
    [
        (("greedy", "sampled"), "auto", 2),
        (("sampled",), "fp8", 1),
        pytest.param(("greedy", "sampled", "edited", "grammar"), "auto", 3, marks=SLOW_INTERPRETED),
        pytest.param(("greedy", "edited", "grammar"), "fp8", 2, marks=SLOW_INTERPRETED),
    ],
)
def test_trees_and_batches_change_no_token(names: tuple[str, ...], kv_dtype: str, accepted: int) -> None:
    parts = device_parts(kv_dtype=kv_dtype)
    (fan,) = parts.drafters
    assert isinstance(fan, FanDrafter)
    assert isinstance(parts.decoder, DeviceDecoder)
    assert (parts.decoder.pool.k.dtype == torch.float8_e4m3fn) == (kv_dtype == "fp8")
    alone = {(name, 0): plain(name, kv_dtype) for name in names}
    fan.answers = {key: outcome.tokens for key, outcome in alone.items()}
    found = run_conditions(parts, FANNED, [request for request in REQUESTS if request.request_id in names])
    mismatches = first_mismatches(FANNED.name, alone, found)
    assert not mismatches, mismatches[0]
    assert sum(outcome.accepted for outcome in found.values()) >= accepted
    assert sum(outcome.preemptions for outcome in found.values()) >= 1


def test_the_cpu_accepts_where_the_gpus_kernels_are_wrong() -> None:
    parts, tokens = device_parts(), plain("sampled").tokens
    sampler = Sampler(ReferenceSampling())
    parts = dataclasses.replace(parts, verifier=None, sampler=sampler, drafters=[FanDrafter(SMALL.vocab_size)])
    (fan,) = parts.drafters
    assert isinstance(fan, FanDrafter)
    fan.answers = {("sampled", 0): tokens}
    found = run_conditions(parts, FANNED, [request for request in REQUESTS if request.request_id == "sampled"])
    assert [outcome.tokens for outcome in found.values()] == [tokens]
    assert sum(outcome.accepted for outcome in found.values()) >= 1


def test_the_device_works_while_sampling_is_prepared_and_the_controller_learns() -> None:
    """Nothing is waited for between the queueing of a forward and that."""
    log: list[str] = []

    def noted(owner: Any, method: str) -> Any:
        original = getattr(owner, method)

        def call(*arguments: Any) -> Any:
            log.append(method)
            return original(*arguments)

        return mock.patch.object(owner, method, call)

    with (
        noted(DeviceNetwork, "forward"),
        noted(SequenceSampling, "row"),
        noted(HostMirror, "wait"),
        noted(step, "step_trace"),
    ):
        run_all(Engine(device_parts()), [dataclasses.replace(REQUESTS[1], stopping=SHORT)])
    assert log == ["forward", "row", "wait", *["forward", "row", "step_trace", "wait"] * 2, "step_trace"]


@pytest.mark.parametrize(("capability", "hip"), [((8, 0), None), ((9, 4), "6.2")], ids=["A100", "MI300"])
def test_a_gpu_without_float8_is_named(capability: tuple[int, int], hip: str | None) -> None:
    """An MI300 has a float8 whose values are not those of the kernels'."""
    model, wanted = device_model(SMALL, "fp16"), config(device_dtype="fp16", kv_dtype="fp8")
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
        mock.patch.object(torch.version, "hip", hip),
        pytest.raises(ConfigError, match=r"engine\.kv_dtype: this GPU does not support fp8"),
    ):
        build_device_decoder(wanted, model, torch.device("cuda"), 1, 64)


@pytest.mark.parametrize("kv_dtype", ["fp32", "int8", "bf16"])
def test_a_kv_cache_type_without_a_kernel_is_named(kv_dtype: str) -> None:
    """A bf16 cache is only supported with bf16 rows."""
    wanted = config(kv_dtype=kv_dtype)
    with pytest.raises(ConfigError, match=rf"engine\.kv_dtype: {kv_dtype} is not supported"):
        device_kv_dtype(wanted, torch.float16)
    assert device_kv_dtype(config(kv_dtype="bf16"), torch.bfloat16) == torch.bfloat16


@pytest.mark.parametrize(
    ("sizes", "largest", "setting"),
    [
        ({"kv_tokens": 1 << 20}, "KV cache of small", "kv_tokens"),
        ({"max_step_rows": 4096}, "attention's partial sums", "max_context"),
        ({"max_step_rows": 4096, "max_batch": 256}, "sampling for", "max_batch"),
    ],
)
def test_insufficient_memory_is_named(sizes: dict[str, int], largest: str, setting: str) -> None:
    """Otherwise the decoder would fail half-way without naming the setting to change."""
    wanted = config(device_dtype="fp16", **sizes)
    many = dataclasses.replace(SMALL, vocab_size=200_000) if "max_batch" in sizes else SMALL
    model = dataclasses.replace(device_model(SMALL, "fp16"), config=many)
    pages, positions = -(-wanted.kv_tokens // 64), 64 if "max_batch" in sizes else 131_072
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(torch.cuda, "mem_get_info", return_value=(1 << 28, 1 << 30)),
        pytest.raises(ModelError, match=rf"^memory of the device: .*; reduce .*\n  {largest}.*  engine\.{setting}"),
    ):
        build_device_decoder(wanted, model, torch.device("cuda"), pages, positions)


def test_only_the_targets_decoder_leaves_working_space() -> None:
    """When a draft's decoder is built, the checks that need the space are done, and torch keeps what they took."""
    platform, model = DevicePlatform(config(device_dtype="fp16"), place()), device_model(SMALL, "fp16")
    with mock.patch.object(build_device, "build_device_decoder", side_effect=ZeroDivisionError) as build:
        for make in (
            lambda: platform.target_decoder(model, 4, 64, ()), lambda: platform.draft_decoder(model, 4, 64, SMALL)
        ):  # fmt: skip
            with pytest.raises(ZeroDivisionError):
                make()
    assert [build_device.WORKING_BYTES in call.args for call in build.call_args_list] == [True, False]


def test_the_weights_reported_are_those_on_the_device() -> None:
    """In 16 bits, embedding included, whatever ``dtype`` a CPU would hold them in."""
    matrices = sum(plan.rows * plan.columns for plan in linear_plans(SMALL))
    embedding = 0 if SMALL.tie_embeddings else SMALL.vocab_size * SMALL.hidden_size
    assert device_parts().config.dtype == "fp32"
    assert device_parts().info.weight_bytes == 2 * (matrices + embedding)


@pytest.mark.parametrize("aux_layers", [(), (0,)])
def test_the_estimate_equals_the_allocated_memory(aux_layers: tuple[int, ...]) -> None:
    model = device_model(SMALL, "fp16")
    meta, sizes = torch.device("meta"), {"max_rows": 70, "max_logit_rows": 40, "max_positions": 600}
    needs = {need.what.split(" of ")[0]: need.nbytes for need in device_needs(
        model, torch.float16, meta, pages=9, aux_layers=len(aux_layers), **sizes
    )}  # fmt: skip
    decoder = DeviceDecoder(model, 9, place(), max_entries=3, aux_layers=aux_layers, **sizes)
    network, pool = decoder.network, decoder.pool
    workspace = SamplingWorkspace.allocate(40, SamplingPlan.of(SMALL.vocab_size), meta)
    rows = (
        network.residual,
        network._y,
        network._qkv,
        network._attended,
        network._gate_up,
        network._chosen,
        network.aux_hidden_states,
    )
    taken = {
        "KV cache": (pool.k, pool.v),
        "attention's partial sums": (network.workspace.partials, network.workspace.peaks),
        "rotary tables": [table for pair in network._angles for table in pair],
        "rows": rows,
        "logits": (network._logits,),
        "sampling for small": [v for v in vars_of(workspace) if isinstance(v, torch.Tensor)],
    }
    assert needs == {what: sum(tensor.nbytes for tensor in tensors) for what, tensors in taken.items()}


def vars_of(instance: Any) -> list[Any]:
    return [getattr(instance, field.name) for field in dataclasses.fields(instance)]


@pytest.mark.parametrize(("name", "accepted"), [("model", 2), ("parallel", 1)])
def test_a_draft_model_runs_on_the_device(name: str, accepted: int) -> None:
    """A twin of the target, so that its proposals are right; the first one of `parallel`, untrained for masks."""
    speculation = SpeculationConfig(drafters=("model",), profile_s=0)
    with mock.patch.object(device_weights, "checked_tokenizer", wraps=device_weights.checked_tokenizer) as reads:
        parts = built(config(device_dtype="fp16", draft=f"random:{NAME}", speculation=speculation))
    assert [call.args[-1] is None for call in reads.call_args_list] == [False, False]  # one vocabulary, read once
    if name == "parallel":
        (twin,) = parts.drafters
        assert isinstance(twin, ModelDrafter)
        twin._decoder.config = dataclasses.replace(twin._decoder.config, mask_token=5)
        parts.drafters[:] = [ParallelDrafter(twin._decoder, twin._sampler, SMALL.vocab_size)]
    request = dataclasses.replace(REQUESTS[1], stopping=SHORT)
    found = run_conditions(parts, BatchConditions("drafted", (name,), 3, 3, 2), [request])["sampled", 0]
    assert found.tokens == plain("sampled").tokens[:3]
    assert found.accepted >= accepted


def test_float32_agrees_with_the_cpu() -> None:
    host = dataclasses.replace(build_parts(config(device="cpu", kv_dtype="fp32")), drafters=[])
    with mock.patch.object(DeviceTypes, "of", return_value=FLOAT32):
        device = built(config())
    each = [dataclasses.replace(parts, drafters=[]) for parts in (host, device)]
    requests = [
        make_request("greedy", 9, 2, output=OutputParams(logprobs=3)),
        dataclasses.replace(REQUESTS[2], stopping=SHORT),
    ]
    expected, got = (run_conditions(parts, BatchConditions("together", concurrency=4), requests) for parts in each)
    for key, outcome in expected.items():
        assert got[key].tokens == outcome.tokens, key
        for (one, best), (other, others) in zip(got[key].logprobs, outcome.logprobs, strict=True):
            assert one == pytest.approx(other, abs=2e-3)
            assert [token for token, _ in best] == [token for token, _ in others]


def test_embeddings_agree_with_the_cpu() -> None:
    """Of a prompt in two chunks, alone and beside a stream: the same bits."""
    host = dataclasses.replace(build_parts(config(device="cpu", kv_dtype="fp32", prefill_chunk=8)), drafters=[])
    with mock.patch.object(DeviceTypes, "of", return_value=FLOAT32):
        device = dataclasses.replace(built(config(prefill_chunk=8)), drafters=[])
    requests = [
        make_request(pooling, 12, stopping=StoppingParams(max_tokens=0), pooling=pooling) for pooling in Pooling
    ]
    found = []
    for parts, more in ((host, []), (device, []), (device, [make_request("stream", 9)])):
        events = run_all(Engine(dataclasses.replace(parts, kv=KvCacheManager(12, prefix_cache=True))), requests + more)
        found.append([finish_of(events, pooling).embedding for pooling in Pooling])
    assert found[1] == found[2]
    for one, other in zip(found[0], found[1], strict=True):
        assert np.frombuffer(one, "<f4") @ np.frombuffer(other, "<f4") >= 0.9999


def test_a_broken_row_fails_its_request_alone() -> None:
    """Its remains in the cache do not affect the request that gets its pages."""
    parts = dataclasses.replace(device_parts(), drafters=[], kv=KvCacheManager(2, prefix_cache=False))
    parts = dataclasses.replace(parts, info=dataclasses.replace(parts.info, max_context=64))
    assert isinstance(parts.decoder, DeviceDecoder)
    embed, sound = parts.decoder.model.weights.embed, dataclasses.replace(REQUESTS[1], stopping=SHORT)
    kept, embed[299] = embed[299].clone(), torch.nan
    try:
        engine = Engine(parts)
        broken = dataclasses.replace(make_request("broken", 1), prompt_ids=(1, 299, *range(8)))
        events = run_all(engine, [broken, sound])
        assert [event.request_id for event in failures(events)] == ["broken"]
        again = run_all(engine, [dataclasses.replace(sound, request_id="again")])
    finally:
        embed[299] = kept
    expected = plain("sampled").tokens[:3]
    assert tokens_of(events, "sampled") == tokens_of(again, "again") == expected


def test_a_sampling_error_fails_its_request_alone() -> None:
    sound, victim = (dataclasses.replace(request, stopping=SHORT) for request in REQUESTS[1:3])
    expected, row = plain("sampled").tokens[:3], SequenceSampling.row

    def faulty(self: SequenceSampling, *args: Any) -> RowSampling:
        if self.policy.seed == victim.sampling.seed:
            raise RuntimeError("injected")
        return row(self, *args)

    with mock.patch.object(SequenceSampling, "row", faulty):
        events = run_all(Engine(dataclasses.replace(device_parts(), drafters=[])), [victim, sound])
    (failure,) = failures(events)
    assert failure.request_id == victim.request_id
    assert failure.message.startswith("sampling failed (RuntimeError: injected)")
    assert tokens_of(events, sound.request_id) == expected


def test_prefill_alone_needs_no_sampling() -> None:
    events = run_all(Engine(device_parts()), [make_request("prompt", 9, stopping=StoppingParams(max_tokens=0))])
    assert not failures(events)


def test_masks_may_outgrow_their_buffer() -> None:
    parts, before = device_parts(), plain("grammar").tokens
    assert isinstance(parts.decoder, DeviceDecoder)
    buffer = parts.decoder.buffer
    with mock.patch.object(buffer, "_on_move", wraps=buffer._on_move) as moved:
        parts.decoder.graphs.clear()  # as the buffer itself has done before it gives memory back
        buffer._allocate_tables(4, 1)
        assert run_conditions(parts, PLAIN, [REQUESTS[3]])["grammar", 0].tokens == before
    assert moved.called


@pytest.mark.parametrize(
    ("given", "rows", "chunk"),
    [({}, 1024, 1024), ({"max_step_rows": 512}, 512, 512), ({"prefill_chunk": 100}, 1024, 100),
     ({"max_step_rows": 256, "prefill_chunk": 192}, 256, 192)],
)  # fmt: skip
def test_steps_are_larger_on_a_gpu_unless_set(given: dict[str, Any], rows: int, chunk: int) -> None:
    parts: list[EngineConfig] = []
    # As the engine's process gets it.
    sent = EngineConfig(target="random:tiny", **given).model_dump_json(exclude_unset=True)
    with (
        mock.patch.object(build, "target_device", return_value=place()),
        mock.patch.object(build, "assemble", lambda config, *_: parts.append(config)),
    ):
        build.build_parts(EngineConfig.model_validate(json.loads(sent)))
    assert [(config.max_step_rows, config.prefill_chunk) for config in parts] == [(rows, chunk)]


def test_a_missing_gpu_is_named() -> None:
    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        assert target_device(config(device="auto")) is None
        with pytest.raises(ConfigError, match=r"engine\.device"):
            target_device(config(device="cuda"))


@pytest.mark.parametrize("capability", [(6, 1), (7, 0), (7, 5)])
def test_a_gpu_that_is_too_old_is_left_alone(capability: tuple[int, int], caplog: pytest.LogCaptureFixture) -> None:
    with (
        mock.patch.multiple(
            torch.cuda, is_available=lambda: True, get_device_capability=lambda: capability,
            get_device_name=lambda: "Tesla T4",
        ),
        mock.patch.object(torch.version, "hip", None),
    ):  # fmt: skip
        assert target_device(config(device="auto")) is None
        assert "Tesla T4 is older" in caplog.text
        with pytest.raises(ConfigError, match=r"engine\.device: Tesla T4 .* set it to cpu"):
            target_device(config(device="cuda"))


def test_a_warm_up_leaves_no_trace() -> None:
    parts = device_parts()
    assert isinstance(parts.decoder, DeviceDecoder)
    assert isinstance(parts.verifier, DeviceVerifier)
    few = mock.patch.object(parts.decoder, "max_rows", 9)
    with few, mock.patch.multiple(device_verify, TREE_SIZES=(3, 1000), POLICIES=POLICIES[2:], RUNS=1):
        warm_up(parts.verifier, parts.decoder)
    request = dataclasses.replace(REQUESTS[1], stopping=SHORT)
    assert run_conditions(parts, PLAIN, [request])["sampled", 0].tokens == plain("sampled").tokens[:3]


def test_a_warm_up_leaves_nothing_to_compile() -> None:
    """Every form of the samplers' kernels that a step can have, and as many rows as any tile of few takes."""
    parts = device_parts()
    decoder, selected = parts.decoder, []
    assert isinstance(decoder, DeviceDecoder)

    class Noting(DeviceVerifier):
        def queue(self, rows: StepRows, samplings: Callable[[], list[RowSampling]], tops: Seq[int | None]) -> Any:
            selected.append((rows.batch.rows, SamplingNeeds.of(samplings()), tops[0]))
            return mock.MagicMock()

    warm_up(Noting(decoder), decoder)
    for noise, filters in ((False, False), (True, False), (True, True)):
        assert (1, SamplingNeeds(noise, filters, edits=True, masks=True), TOP) in selected
        assert all(selected.count((rows, SamplingNeeds(noise, filters), None)) >= RUNS for rows in (1, 32, 64))


def test_another_kind_of_sampling_captures_no_forward_again() -> None:
    parts = device_parts()
    decoder, verifier = parts.decoder, parts.verifier
    assert isinstance(decoder, DeviceDecoder)
    assert isinstance(verifier, DeviceVerifier)
    batch = ForwardBatch.build([BatchEntry([1], [-1], 0, [0])])
    rows, keys = StepRows(batch, [0], [0], [0]), set()
    with mock.patch.object(decoder.graphs, "run", lambda key, work: keys.add(key)):
        for policy in POLICIES:
            for top in (None, TOP):
                verifier.queue(rows, [RowSampling(policy, PAGE_SIZE)].copy, [top])
        decoder.forward(batch, [0])
    assert [key[0] for key in keys].count("forward") == 1
    assert len(keys) == 1 + 2 * len(POLICIES)


@pytest.mark.parametrize("top", [None, 2])
def test_a_step_does_not_synchronize(top: int | None) -> None:
    parts = device_parts()
    decoder, verifier = parts.decoder, parts.verifier
    assert isinstance(decoder, DeviceDecoder)
    assert isinstance(verifier, DeviceVerifier)
    batch = ForwardBatch.build([BatchEntry([1, 2, 3], [-1, 0, 0], 0, [0])])
    samplings = [RowSampling(SamplingPolicy(1, top_p=0.9), 5)] * 3
    step = decoder.buffer.load(batch, [0, 1, 2], [0], [0])
    table, needs = decoder.buffer.load_table(step.tier.samples, samplings)
    outputs = DeviceOutputs.allocate(step.tier.entries, step.tier.samples, top, 63, decoder.device)
    with recorded_launches() as launches, NoHostRead(decoder.device.type):
        decoder.network.forward(step)
        verifier.decide(step, table, needs, decoder.network.logits(step.tier.samples), outputs)
    names = [launch.kernel.__name__ for launch in launches]
    assert names[0] == "scan_paths_kernel"
    assert names[-1] == "move_kv_kernel"
    assert names.count("tree_attention_kernel") == SMALL.n_layers
    assert names.count("choose_kernel") == (1 if top is None else 2)


@pytest.mark.parametrize(("left", "tokens"), [(1 << 40, 4 * 320), (1 << 20, 512), (0, 128)])
def test_a_cache_sized_by_memory_uses_the_devices_memory(left: int, tokens: int) -> None:
    """A full batch of longest sequences if it fits; a head's cache on the CPU may be smaller. Graphs and the checks at
    start have their share."""
    free = build_device.WORKING_BYTES + left
    platform = DevicePlatform(config(kv_tokens=0, device_dtype="fp16"), place())
    model = device_model(SMALL, "fp16")
    with (
        mock.patch.object(build_device, "available_bytes", return_value=free),
        mock.patch.object(torch.cuda, "mem_get_info", return_value=(free, 1 << 41)),
    ):
        assert platform.kv_tokens(model, 0, MemoryBudget([], 1 << 40, kv_tokens=1 << 20)) == tokens
        assert platform.kv_tokens(model, 0, MemoryBudget([], 1 << 40, kv_tokens=128)) == 128
