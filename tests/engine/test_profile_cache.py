"""Values stored in the cache folder, including learned profiles: complete or absent, and no obstacle to a start."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path

import pytest

from draft.protocol import Drafter, ModelBasedDrafter
from specdec.control.estimates.costs import CostTable
from specdec.control.estimates.learned import Learned
from specdec.control.trace import read_trace, replay_file
from specdec.core.types import Request, SamplingParams, SpeculationMode, SpeculationParams, StoppingParams
from specdec.engine.build import WARM_UP_TEXTS, _costs_key, warm_up, with_profile
from specdec.engine.profile_cache import LearnedProfile, ProfileCache
from specdec.engine.profile_costs import StepCosts
from tests.engine.tiny_engine import run_all, tiny_engine, tiny_parts

KNOWN = Learned([(5, 2.0, 4.0)], [(0, 3.0, 4.0, 5.0, 6.0)], 0.5)


def drafter(name: str, digest: str | None = None) -> Drafter:
    made = Drafter() if digest is None else ModelBasedDrafter()
    made.name = name
    if isinstance(made, ModelBasedDrafter) and digest is not None:
        made.digest = digest
    return made


def test_stored_values_are_read_with_the_same_key(tmp_path: Path) -> None:
    kept = ProfileCache(tmp_path, "costs", ["weights", 1])
    assert kept.read() == {}
    kept.write({"a": [1, 2.5]})
    assert ProfileCache(tmp_path, "costs", ["weights", 1]).read() == {"a": [1, 2.5]}
    assert ProfileCache(tmp_path, "costs", ["weights", 2]).read() == {}
    assert [path.name for path in kept.path.parent.iterdir()] == [kept.path.name]


def test_a_full_disk_leaves_the_values_as_they_were(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    kept = ProfileCache(tmp_path, "costs", ["weights"])
    kept.write({"a": 1})
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        kept.write({"a": 2})
    assert [record.getMessage() for record in caplog.records] == [
        f"{kept.path}: cannot be written ([Errno 28] No space left on device)"
    ]
    assert kept.read() == {"a": 1}
    assert list(kept.path.parent.iterdir()) == [kept.path]


def test_other_users_may_read_what_is_cached_as_far_as_the_umask_allows(tmp_path: Path) -> None:
    kept = ProfileCache(tmp_path, "costs", ["weights"])
    former = os.umask(0o027)
    try:
        kept.write({"a": 1})
    finally:
        os.umask(former)
    assert kept.path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"version": 0, "key": "", "values": {}}', "[" * 100_000, "\xff"])
def test_a_damaged_file_is_ignored_with_one_line(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = LearnedProfile(tmp_path, "target")
    kept = ProfileCache(tmp_path, "learned", ["target"])
    file.write([drafter("suffix")], {"suffix": KNOWN})
    kept.path.write_text(text, encoding="latin-1")
    with caplog.at_level(logging.WARNING):
        assert file.read([drafter("suffix")]) == {}
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("was", "now"), [("2.0", "Infinity"), ("2.0", "-1.0"), ("[[5", "[[6"), ("0.5", "null")])
def test_changed_values_are_ignored_with_one_line(
    was: str, now: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept, file = ProfileCache(tmp_path, "learned", ["target"]), LearnedProfile(tmp_path, "target")
    file.write([drafter("suffix")], {"suffix": KNOWN})
    text = kept.path.read_text()
    kept.path.write_text(text.replace(was, now))
    with caplog.at_level(logging.WARNING):
        assert file.read([drafter("suffix")]) == {}
    assert len(caplog.records) == 1
    kept.path.write_text(text)
    assert file.read([drafter("suffix")]) == {"suffix": KNOWN}


def test_a_file_copied_from_other_weights_is_ignored(tmp_path: Path) -> None:
    one, other = ProfileCache(tmp_path, "learned", ["one"]), ProfileCache(tmp_path, "learned", ["other"])
    one.write({"a": 1})
    other.path.write_bytes(one.path.read_bytes())
    assert other.read() == {}


def test_a_failed_write_logs_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "controller").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        ProfileCache(tmp_path, "costs", ["weights"]).write({"a": 1})
    assert len(caplog.records) == 1


def test_records_are_found_by_the_weights_of_the_drafter(tmp_path: Path) -> None:
    file = LearnedProfile(tmp_path, "target")
    file.write([drafter("model", "a"), drafter("suffix")], {"model": KNOWN, "suffix": KNOWN})
    other = dataclasses.replace(KNOWN, agreement=0.9)
    file.write([drafter("model", "b"), drafter("head", "")], {"model": other, "head": KNOWN})
    assert file.read([drafter("model", "a"), drafter("suffix")]) == {"model": KNOWN, "suffix": KNOWN}
    assert file.read([drafter("model", "b"), drafter("head", "")]) == {"model": other}
    assert file.read([drafter("model", "c")]) == {}
    assert LearnedProfile(tmp_path, "another").read([drafter("suffix")]) == {}


def test_an_engine_stores_its_profile_and_the_next_one_starts_with_it(tmp_path: Path) -> None:
    base = tiny_parts()
    file = LearnedProfile(tmp_path, "target")
    requests = [
        Request(
            f"r{i}",
            (7, 8, 9, 10) * 6,
            SamplingParams(seed=i),
            stopping=StoppingParams(max_tokens=24, ignore_eos=True),
            speculation=SpeculationParams((SpeculationMode.ON, SpeculationMode.AUTO)[i % 2]),
        )
        for i in range(4)
    ]
    first = tiny_engine(dataclasses.replace(base, learned_file=file))
    run_all(first, requests)
    first.close()
    learned = file.read(base.drafters)
    assert set(learned) == {"suffix", "model"}
    trace = tmp_path / "trace.jsonl"
    speculation = base.config.speculation.model_copy(update={"trace_file": trace})
    second = tiny_engine(dataclasses.replace(base, learned=learned), speculation=speculation)
    assert {name: known.cells for name, known in second.learned().items()} == {
        name: known.cells for name, known in learned.items()
    }
    # With other seeds, since the suffix drafter has the first answers.
    others = [dataclasses.replace(one, sampling=SamplingParams(seed=10 + i)) for i, one in enumerate(requests)]
    run_all(second, others)
    second.close()
    header, _ = read_trace(trace)
    assert {name: Learned.from_dict(known) for name, known in header["start"].items()} == learned
    report = replay_file(trace)
    assert report.steps > 10
    assert report.differences == []
    assert file.read(base.drafters) == learned  # an engine without a file writes none


def test_the_estimates_of_a_warm_up_are_stored(tmp_path: Path) -> None:
    base, file = tiny_parts(), LearnedProfile(tmp_path, "target")
    speculation = base.config.speculation.model_copy(update={"profile_s": 60.0})
    config = base.config.model_copy(update={"speculation": speculation})
    parts = dataclasses.replace(base, config=config, costs=StepCosts(CostTable.guess(64).as_dict()))
    learned = with_profile(parts, file).learned
    assert set(learned) == {"model"}
    assert file.read(parts.drafters) == learned


def test_a_draft_swap_starts_with_the_stored_profile(tmp_path: Path) -> None:
    base = tiny_parts()
    file = LearnedProfile(tmp_path, "target")
    model = next(one for one in base.drafters if isinstance(one, ModelBasedDrafter))
    file.write([model], {"model": KNOWN})
    engine = tiny_engine(dataclasses.replace(base, learned_file=file))
    assert engine.learned() == {}
    engine.swap_draft(None)
    engine.swap_draft(("draft", model))
    assert engine.learned()["model"].cells == KNOWN.cells


def test_a_swap_keeps_the_profiles_of_others_even_if_the_folder_is_not_writable(tmp_path: Path) -> None:
    folder = tmp_path / "file"
    folder.write_text("no folder")
    engine = tiny_engine(dataclasses.replace(tiny_parts(), learned_file=LearnedProfile(folder, "target")))
    ask = Request(
        "r",
        (7, 8, 9, 10) * 6,
        SamplingParams(seed=50),
        StoppingParams(max_tokens=16, ignore_eos=True),
        speculation=SpeculationParams(SpeculationMode.ON),
    )
    run_all(engine, [ask])
    known = engine.learned()["suffix"]
    assert known.cells
    engine.swap_draft(None)
    assert engine.learned()["suffix"].cells == known.cells


def test_costs_are_keyed_by_measured_contexts_and_not_by_free_memory() -> None:
    parts = tiny_parts()
    short, long, longer = (
        _costs_key(
            parts.config, dataclasses.replace(parts.info, max_context=context, kv_tokens=pages * 64), "target",
            parts.drafters,
        )
        for context, pages in ((448, 40), (4096, 400), (8192, 350))
    )  # fmt: skip
    assert short != long == longer


def test_a_warm_up_estimates_the_drafts_value_and_leaves_no_state() -> None:
    parts = tiny_parts()
    free = parts.kv.n_free
    learned = warm_up(parts, 60.0)
    assert set(learned) == {"model"}
    assert sum(trials for _, _, trials in learned["model"].cells) > 2 * len(WARM_UP_TEXTS)
    assert [bucket for bucket, *_ in learned["model"].pools] == [0, 2]  # greedy, and sampled
    for _, steps, _, levels, rows in learned["model"].pools:
        assert steps > len(WARM_UP_TEXTS) / 2
        assert rows == levels
    assert parts.kv.n_free == free
    engine = tiny_engine(dataclasses.replace(parts, learned=learned))
    assert engine.load().steps == 0
