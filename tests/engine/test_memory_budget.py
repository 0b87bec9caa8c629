"""The memory that an engine needs: the sum is right, and an error names what to change."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draft.model import TAIL_POOL
from specdec.config import LEAST_KV_TOKENS, EngineConfig, SpeculationConfig
from specdec.control_groups import available_bytes
from specdec.engine.build import assemble, build_parts
from specdec.engine.memory import (
    MemoryBudget,
    MemoryNeed,
    draft_kv_dtype,
    host_kv_dtype,
    kv_tokens_by_memory,
    plan_memory,
    report_memory,
)
from specdec.engine.platform import HostPlatform
from specdec.errors import ConfigError, ModelError
from specdec.models.decoder import KvPool, kv_page_bytes
from specdec.models.load import load_model
from specdec.models.memory import measure_model
from specdec.models.random_model import RANDOM_SHAPES
from specdec.models.resolve import load_tokenizer
from specdec.models.vocabulary_cut import VocabularyCut
from tests.draft.eagle3_checkpoint import head_config, head_tensors, write_head
from tests.models.tiny import make_tiny_model
from verify_kernels.backend_selection import load_kernels

MIB = 1 << 20
# The library is built already; the self-test of the reference kernels takes seconds.
BUILT = {"device": "cpu", "draft": None, "kernels": "native", "cache_dir": Path("~/.cache/specdec")}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("budget")
    return make_tiny_model("llama", folder / "t"), make_tiny_model("qwen3", folder / "d", seed=5), folder / "cache"


def make_config(folders: tuple[Path, Path, Path], **changes: object) -> EngineConfig:
    target, draft, cache = folders
    given = {"target": str(target), "draft": str(draft), "cache_dir": cache, "kv_tokens": 64 * 100} | changes
    return EngineConfig.model_validate(given)


@pytest.mark.parametrize("dtype", ["int8", "fp32", "int4", "int3"])
def test_a_model_is_measured_as_it_will_be_loaded(folders: tuple[Path, Path, Path], dtype: str) -> None:
    target, _, cache = folders
    before = measure_model(str(target), dtype=dtype, cache_dir=cache)  # type: ignore[arg-type]
    model = load_model(str(target), dtype=dtype, cache_dir=cache)  # type: ignore[arg-type]
    (packed,) = cache.glob(f"packed/t-{dtype}-*.packed")
    after = measure_model(str(target), dtype=dtype, cache_dir=cache)  # type: ignore[arg-type]
    assert before.weight_bytes == after.weight_bytes
    assert packed.stat().st_size - 2 * MIB < before.weight_bytes <= packed.stat().st_size
    assert (before.name, before.config.n_layers, after.config.vocab_size) == (
        model.name, model.config.n_layers, model.config.vocab_size,
    )  # fmt: skip


def test_the_budget_counts_both_models_and_both_caches(folders: tuple[Path, Path, Path]) -> None:
    target, draft, cache = folders
    sizes = [
        measure_model(str(target), dtype="int8", cache_dir=cache),
        measure_model(str(draft), dtype="int4", cache_dir=cache),
    ]
    budget = plan_memory(make_config(folders), available=1 << 40)
    by_name = {need.what: need for need in budget.needs}
    counts = (100, 100 + TAIL_POOL)
    pages = [n * kv_page_bytes(size.config, torch.bfloat16) for n, size in zip(counts, sizes, strict=True)]
    assert [by_name["target: KV cache"].nbytes, by_name["draft: KV cache"].nbytes] == pages
    assert by_name["target: weights of t"].nbytes == sizes[0].weight_bytes
    assert by_name["draft: weights of d"].nbytes == sizes[1].weight_bytes
    assert budget.needed == sum(need.nbytes for need in budget.needs if not need.later)
    assert budget.later > 0
    alone = plan_memory(make_config(folders, draft=None), available=1 << 40)
    assert not [need for need in alone.needs if need.what.startswith("draft")]
    off = make_config(folders, speculation=SpeculationConfig(enabled=False))
    assert not [need for need in plan_memory(off, available=1 << 40).needs if need.what.startswith(("draft", "texts"))]


def test_a_cache_sized_by_memory_leaves_room_for_texts_without_their_starts(folders: tuple[Path, Path, Path]) -> None:
    fixed = plan_memory(make_config(folders, kv_tokens=1024), available=1 << 40)
    config = make_config(folders, kv_tokens=0, max_context=2048)
    assert plan_memory(config, available=fixed.needed + config.spare_bytes).kv_tokens == 1024


@pytest.mark.parametrize("kv_dtype", ["auto", "fp32", "bf16", "int8"])
def test_the_caches_are_measured_as_they_will_be_built(folders: tuple[Path, Path, Path], kv_dtype: str) -> None:
    config = make_config(folders, kv_dtype=kv_dtype)
    needs = {need.what: need for need in plan_memory(config, available=1 << 40).needs}
    for folder, role, dtype in zip(folders, ("target", "draft"), (host_kv_dtype, draft_kv_dtype), strict=False):
        shape = measure_model(str(folder), dtype="int8", cache_dir=folders[2]).config
        pool = KvPool(shape, 100 + (TAIL_POOL if role == "draft" else 0), dtype(config))
        assert needs[f"{role}: KV cache"].nbytes == sum(each.nbytes for each in pool.tensors.lanes())
        assert "engine.kv_dtype" in needs[f"{role}: KV cache"].options


def test_an_error_suggests_a_size_that_fits(folders: tuple[Path, Path, Path]) -> None:
    config = make_config(folders, kv_tokens=64 * 10_000)
    available = plan_memory(make_config(folders, kv_tokens=64 * 50), available=1 << 40).needed
    with pytest.raises(ModelError, match=r"lower engine\.kv_tokens from 640000 to 3200") as caught:
        plan_memory(config, available=available).check()
    assert "target: weights of t" in str(caught.value)
    assert plan_memory(make_config(folders, kv_tokens=3200), available=available).fits
    assert not plan_memory(make_config(folders, kv_tokens=3264), available=available).fits


def test_if_no_cache_fits_other_options_are_named(folders: tuple[Path, Path, Path]) -> None:
    with pytest.raises(ModelError, match=r"reduce engine\.kv_tokens.*or free some memory"):
        plan_memory(make_config(folders), available=MIB).check()


def test_an_error_names_the_memory_that_is_left_to_other_programs(folders: tuple[Path, Path, Path]) -> None:
    with pytest.raises(ModelError, match=r"GiB of 0\.00 available, besides 64\.00 of engine\.spare_bytes"):
        plan_memory(make_config(folders, spare_bytes=64 * GIB), available=GIB).check()


def test_an_engine_that_does_not_fit_is_rejected_before_loading(
    folders: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.engine.memory.available_bytes", lambda: 300 * MIB)
    monkeypatch.setattr("specdec.engine.platform.load_model", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(ModelError, match=r"lower engine\.kv_tokens from 12800000 to"):
        build_parts(make_config(folders, kv_tokens=64 * 200_000, **BUILT))


def test_a_cache_type_that_needs_a_gpu_is_rejected_without_one(folders: tuple[Path, Path, Path]) -> None:
    with pytest.raises(ConfigError, match=r"engine\.kv_dtype: fp8 needs a GPU"):
        build_parts(make_config(folders, kv_dtype="fp8", **BUILT))


def test_possible_later_allocations_cause_a_warning_only(caplog: pytest.LogCaptureFixture) -> None:
    needs = [MemoryNeed("a", 50), MemoryNeed("texts", 60, ("engine.speculation.sessions",), later=True)]
    report_memory(MemoryBudget(needs, 111))
    assert not caplog.records or "lower" not in caplog.text
    report_memory(MemoryBudget(needs, 109))
    assert "lower engine.speculation.sessions to be safe" in caplog.text


@given(st.lists(st.integers(0, 1 << 40), max_size=6), st.integers(0, 1 << 42))
def test_it_fits_exactly_when_the_sum_does(sizes: list[int], available: int) -> None:
    budget = MemoryBudget([MemoryNeed(str(i), size, ("o",)) for i, size in enumerate(sizes)], available)
    assert budget.fits == (sum(sizes) <= available)
    if budget.fits:
        budget.check()
    else:
        with pytest.raises(ModelError):
            budget.check()


def write_group(folder: Path, limit: str, used: int, reclaimable: int, version: int) -> None:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    prefix = "" if version == 2 else "total_"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{prefix}inactive_file {reclaimable}\n{prefix}active_file 0\n")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """9,000 bytes are free on it."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=9000))


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("version", "line"), [(2, "0::/slice/unit"), (1, "4:cpu,memory:/slice/unit")])
def test_the_tightest_of_all_enclosing_groups_applies(tmp_path: Path, version: int, line: str) -> None:
    own = tmp_path / "own"
    own.write_text(f"9:pids:/elsewhere\n{line}\n")
    mount = tmp_path / "mount"
    root = mount if version == 2 else mount / "memory"
    assert available_bytes(mount, own) == 9000
    write_group(root / "slice/unit", "max", 10, 0, version)
    assert available_bytes(mount, own) == 9000
    write_group(root / "slice", "1000", 400, 50, version)
    assert available_bytes(mount, own) == 650
    write_group(root / "slice/unit", "500", 100, 0, version)
    assert available_bytes(mount, own) == 400
    write_group(root / "other", "1", 1, 0, version)
    assert available_bytes(mount, own) == 400
    (root / "slice/unit/memory.stat").unlink()
    assert available_bytes(mount, own) == 650


@pytest.mark.usefixtures("machine")
def test_a_host_path_inside_a_container_finds_the_containers_limit(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/not/mounted/here\n")
    write_group(tmp_path / "mount", "1000", 100, 0, 2)
    assert available_bytes(tmp_path / "mount", own) == 900
    assert available_bytes(tmp_path / "mount", tmp_path / "missing") == 900


@pytest.mark.usefixtures("machine")
def test_a_limit_of_the_address_space_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.Process.memory_info", lambda _: SimpleNamespace(vms=700))
    for most, available in ((resource.RLIM_INFINITY, 9000), (20_000, 9000), (1000, 300)):
        monkeypatch.setattr("resource.getrlimit", lambda _, most=most: (most, resource.RLIM_INFINITY))
        assert available_bytes(tmp_path) == available


GIB = 1 << 30


@given(
    left=st.integers(-GIB, 200 * GIB), token_bytes=st.integers(1 << 8, 1 << 20), batch=st.integers(1, 64),
    context=st.integers(128, 1 << 15),
)  # fmt: skip
def test_a_cache_sized_by_memory_leaves_memory_for_another_server(
    left: int, token_bytes: int, batch: int, context: int
) -> None:
    config = EngineConfig(max_batch=batch, max_context=context)
    tokens, rule = kv_tokens_by_memory(config, RANDOM_SHAPES["tiny"], token_bytes, left)
    longest = context + 64
    assert LEAST_KV_TOKENS <= tokens <= batch * longest
    if "two fifths" in rule:
        assert 0.35 * left - 64 * token_bytes - longest * token_bytes <= tokens * token_bytes <= 0.4 * left
    elif "one sequence" in rule:
        assert 0.4 * left < longest * token_bytes
        assert tokens == LEAST_KV_TOKENS or tokens * token_bytes <= left
    else:
        assert (tokens, tokens * token_bytes <= 0.4 * left) == (batch * longest, True)


def caches(budget: MemoryBudget) -> int:
    """Bytes of the KV caches."""
    return sum(need.nbytes for need in budget.needs if "KV cache" in need.what)


def test_two_servers_fit_with_caches_sized_by_memory(folders: tuple[Path, Path, Path]) -> None:
    """The first one's cache is not touched yet, so the second sees its memory as free."""
    config = make_config(folders, kv_tokens=0, max_batch=256, max_context=512)
    full = plan_memory(config, available=64 * GIB)
    assert "KV cache: 256 sequences of 512 tokens" in full.summary()
    others = full.needed - caches(full) + full.later
    for factor in (0.5, 1, 2, 4):
        available = 2 * others + int(factor * caches(full))
        first = plan_memory(config, available=available)
        second = plan_memory(config, available=available - (first.needed - caches(first)))
        assert (first.fits, second.fits) == (True, True)
        assert first.needed + second.needed <= available
        assert full.kv_tokens >= first.kv_tokens >= second.kv_tokens > 512


def test_memory_for_future_texts_is_reserved_unless_one_sequence_needs_it(
    folders: tuple[Path, Path, Path],
) -> None:
    config = make_config(folders, kv_tokens=0, max_batch=256, max_context=512)
    full = plan_memory(config, available=64 * GIB)
    roomy = plan_memory(config, available=full.needed + full.later)
    assert "two fifths" in roomy.kv_rule
    assert roomy.needed + roomy.later < roomy.available
    tight = plan_memory(config, available=full.needed)
    assert tight.fits
    assert (tight.kv_tokens, tight.kv_rule) == (576, "one sequence, as long as memory allows")


def test_an_engine_has_the_planned_cache(folders: tuple[Path, Path, Path]) -> None:
    config = make_config(folders, kv_tokens=0, max_batch=4, **BUILT)
    parts = build_parts(config.model_copy(update={"speculation": SpeculationConfig(profile_s=0, drafters=())}))
    assert parts.info.kv_tokens == parts.config.kv_tokens == 4 * (parts.info.max_context + 64)
    assert parts.kv.n_total == parts.info.kv_tokens // 64


def test_a_cache_that_no_longer_fits_once_the_model_is_loaded_is_rejected(
    folders: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    speculation = SpeculationConfig(profile_s=0, drafters=())
    config = make_config(folders, speculation=speculation, **BUILT)
    shape = measure_model(str(folders[0]), dtype="int8", cache_dir=folders[2]).config
    pool = 100 * kv_page_bytes(shape, host_kv_dtype(config))
    needed = pool + config.max_step_rows * shape.vocab_size * 4 + config.spare_bytes
    monkeypatch.setattr("specdec.engine.platform.available_bytes", lambda: needed)
    build_parts(config)
    monkeypatch.setattr("specdec.engine.platform.available_bytes", lambda: needed - 1)
    with pytest.raises(ModelError, match=r"engine\.kv_tokens: the KV cache of t: .*lower engine\.kv_tokens"):
        build_parts(config)


def test_a_context_larger_than_the_cache_causes_a_warning(
    folders: tuple[Path, Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    speculation = SpeculationConfig(profile_s=0, drafters=())
    config = make_config(folders, kv_tokens=256, max_context=512, **BUILT)
    parts = build_parts(config.model_copy(update={"speculation": speculation}))
    assert parts.info.max_context == 192
    assert "engine.max_context: the KV cache has room for sequences of 192 tokens, not of 512" in caplog.text


def test_a_draft_models_output_table_is_counted_truncated(
    folders: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft, cache = folders
    tokenizer = load_tokenizer(str(target), cache)
    cut = VocabularyCut(tokenizer.fingerprint, np.arange(40, dtype=np.int32))
    monkeypatch.setattr("specdec.engine.memory.most_frequent", lambda *_: cut)
    config = make_config(folders)
    budget = plan_memory(config, available=1 << 40, tokenizer=tokenizer)
    (weights,) = (need.nbytes for need in budget.needs if need.what.startswith("draft: weights"))
    loaded = load_model(str(draft), dtype="int4", cache_dir=cache, cut=cut)
    assert loaded.config.output_size == 40
    assert weights == measure_model(str(draft), dtype="int4", cache_dir=cache, cut=cut).weight_bytes
    whole = measure_model(str(draft), dtype="int4", cache_dir=cache)
    assert weights < whole.weight_bytes
    embedding = whole.config.vocab_size * whole.config.hidden_size * 2
    assert 0.5 * (whole.weight_bytes - embedding) < whole.read_bytes <= whole.weight_bytes - embedding  # less padding


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"draft": "nosuch"}, ModelError, r"^engine\.draft: nosuch: no such file"),
        ({"draft_head": "/nope"}, ConfigError, r"^engine\.draft_head: /nope has no config\.json; name the folder"),
        ({"draft_head": "{head}"}, ModelError, r"^engine\.draft_head: .*the head reads the inputs"),
    ],
)
def test_bug_an_error_of_a_draft_names_its_field(
    folders: tuple[Path, Path, Path], changes: dict[str, str], error: type[Exception], message: str, tmp_path: Path
) -> None:
    config = json.loads((folders[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [99]}))
    given = {name: value.format(head=tmp_path) for name, value in changes.items()}
    with pytest.raises(error, match=message):
        plan_memory(make_config(folders, **{"draft": None} | given))


@pytest.mark.parametrize(("dtype", "packed", "embedded"), [("int8", 1, 2), ("bf16", 2, 2), ("fp32", 4, 4)])
def test_bug_a_heads_own_embedding_is_counted_as_it_is_held(
    folders: tuple[Path, Path, Path], dtype: str, packed: int, embedded: int, tmp_path: Path
) -> None:
    target = measure_model(str(folders[0]), dtype="int8", cache_dir=folders[2]).config
    tensors = head_tensors(target.hidden_size, target.vocab_size, 20)
    head = write_head(tmp_path / "head", head_config(target.vocab_size, 20), tensors)
    config = make_config(folders, draft_head=str(head), draft=None, dtype=dtype)
    needs = {need.what: need.nbytes for need in plan_memory(config, available=1 << 40).needs}
    values = {name: tensor.numel() for name, tensor in tensors.items() if tensor.dim() == 2}
    embedding = values.pop("embed_tokens.weight")
    assert needs["head: weights"] == packed * sum(values.values()) + embedded * embedding


class NoWeights:
    """A platform on which the target must not be loaded; not the CPU's."""

    def load_target(self, *_: object) -> None:
        raise AssertionError("the target's weights are loaded")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculation": {"drafters": ["suffix", "sufix"]}}, r"speculation\.drafters: unknown drafter 'sufix'; known"),
        ({"indexes": {"mine": "/nope.idx"}}, r"engine\.indexes\.mine: index /nope\.idx does not exist"),
        ({"draft": "nosuch"}, r"engine\.draft: nosuch: no such file"),
    ],
)
@pytest.mark.parametrize("on_device", [False, True])
def test_bug_drafters_are_checked_before_the_target_is_loaded(
    folders: tuple[Path, Path, Path],
    changes: dict[str, Any],
    message: str,
    on_device: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loading a large model takes minutes, and a misspelt name should cost none of them."""
    monkeypatch.setattr(HostPlatform, "load_target", NoWeights.load_target)
    config, kernels = make_config(folders, **changes), load_kernels("reference", folders[2], 1)
    platform: Any = NoWeights() if on_device else HostPlatform(config, kernels)
    with pytest.raises((ConfigError, ModelError), match=message):
        assemble(config, platform, kernels, 1)


def test_bug_an_adapter_beside_the_model_causes_a_warning(
    folders: tuple[Path, Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(folders[0], tmp_path / "tuned"))
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    config, kernels = make_config(folders, target=str(folder)), load_kernels("reference", folders[2], 1)
    platform: Any = NoWeights()
    with pytest.raises(AssertionError):
        assemble(config, platform, kernels, 1)
    assert f"engine.target: the adapter in {folder} is not applied" in caplog.text
