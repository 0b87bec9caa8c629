"""Which of several heads and draft models to keep, on a clock that counts forwards."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from bench import drafts_bench, engine_bench
from bench.drafts_bench import Candidate, DraftsReport, compare, file_prompts, load_candidates
from bench.engine_bench import BenchError, EngineRunner, WorkloadRuns
from bench.engine_runs import GroupRun, RequestRun
from specdec.cli.main import cli
from specdec.config import EngineConfig, SpeculationConfig
from specdec.engine.engine import EngineParts
from specdec.load.figures import rounded
from specdec.models.load import load_model
from tests.draft.eagle3_checkpoint import head_config, head_tensors, write_head
from tests.draft.tiny_drafts import CACHE, folders

AUX = "eagle_aux_hidden_state_layer_ids"
PROMPTS = ["def mean(values):\n", "for i in range(10):\n", "the quick brown fox"]


def config(**changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "target": str(folders()["target"]), "dtype": "int8", "draft_dtype": "int8", "kernels": "native", "threads": 1,
        "cache_dir": CACHE, "max_batch": 8, "max_step_rows": 96, "prefill_chunk": 64, "max_context": 448,
        "speculation": SpeculationConfig(profile_s=0.0),
    }  # fmt: skip
    return EngineConfig(**(settings | changes))


def head(folder: Path, layers: list[int], seed: int = 0, **changes: Any) -> str:
    shape = load_model(str(folders()["target"]), dtype="int8", cache_dir=CACHE.expanduser()).config
    tensors = head_tensors(shape.hidden_size, shape.vocab_size, 200, seed=seed)
    return str(write_head(folder, head_config(shape.vocab_size, 200, **{AUX: layers}, **changes), tensors))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineParts, list[Candidate]]:
    """Two heads that read different layers, the target itself as a draft model, and an unrelated one."""
    folder = tmp_path_factory.mktemp("heads")
    heads = [head(folder / "a", [0, 1, 1]), head(folder / "b", [1, 0, 0], seed=4)]
    return load_candidates(config(), heads, [str(folders()["target"]), str(folders()["other"])])


@pytest.fixture(autouse=True)
def _no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts_bench, "engine_facts", lambda config, info: {"target": info.target})


def prompts(folder: Path, *lines: object) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines), "utf-8")
    return file


@pytest.fixture
def report(
    loaded: tuple[EngineParts, list[Candidate]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level_s: float
) -> DraftsReport:
    """A forward of the target takes a second, and one of a candidate ``level_s``."""
    base, candidates = loaded
    now = 0.0

    def timed(decoder: Any, seconds: float) -> None:
        forward = decoder.forward

        def slower(*args: Any) -> Any:
            nonlocal now
            now += seconds
            return forward(*args)

        monkeypatch.setattr(decoder, "forward", slower)

    timed(base.decoder, 1.0)
    for candidate in candidates:
        drafter: Any = candidate.parts.drafters[-1]
        timed(drafter._network if candidate.drafter == "head" else drafter._decoder, level_s)
    lines = [{"prompt": text, "max_tokens": 48} for text in PROMPTS]
    workload = file_prompts(prompts(tmp_path, *lines), base.tokenizer, 8, None)
    monkeypatch.setattr(engine_bench, "EngineRunner", functools.partial(EngineRunner, clock=lambda: now))
    clocked = [replace(one, parts=replace(one.parts, clock=lambda: now)) for one in candidates]
    return compare(replace(base, clock=lambda: now), clocked, [workload], lambda line: None)


@pytest.mark.parametrize("level_s", [0.001])
def test_a_twin_of_the_target_is_kept_where_its_levels_are_cheap(report: DraftsReport) -> None:
    twin = f"draft {folders()['target']}"
    figures = json.loads(json.dumps(report.as_dict()))
    arms, reason = figures["arms"], figures["reason"]
    assert figures["keep"] == twin, reason
    assert reason.startswith(f"{twin} takes ")
    assert "faster than off on 2 of 2 prompts" in reason
    assert arms[twin]["acceptance"] == [1.0] * 8  # the chains count, not the trees of auto
    assert arms["off"]["tokens_per_step"] == 1.0
    assert arms[twin]["ratio"] > 2 > 1.1 > max(row["ratio"] for arm, row in arms.items() if arm != twin)
    assert all(row["acceptance"][0] < 0.5 and row["level_ms"] > 0 for arm, row in arms.items() if "head" in arm)
    assert len(figures["prompts"]) == 2
    assert set(figures["prompts"][0]["arms"]) >= {"off", "no candidate", twin, f"{twin} 8x1"}


@pytest.mark.parametrize("level_s", [3.0])
def test_none_is_kept_where_a_level_costs_more_than_it_saves(report: DraftsReport) -> None:
    assert report.as_dict()["keep"] == "none"
    assert report.as_dict()["reason"].startswith(
        "no candidate takes "
    )  # the texts repeat themselves, which needs no model


def test_off_is_not_compared_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"off": 12.33, "no candidate": 13.0}
    arms = {arm: {"ms_per_token": ms, "faster_on": 0} for arm, ms in times.items()}
    monkeypatch.setattr(DraftsReport, "figures", lambda self: arms)
    found = DraftsReport({}, [], WorkloadRuns("drafts", False)).as_dict()
    assert (found["keep"], found["reason"]) == ("none", "off takes 12.33 ms per token; no candidate 13.00")


def test_a_first_token_that_comes_later_counts_against_a_candidate() -> None:
    """Its prompts are those on which the whole answer came sooner, as its time per token counts."""
    runs = WorkloadRuns("drafts", False)
    for first_s, decode_s in ((9.0, 5.0), (2.0, 5.0)):
        off, late = RequestRun("a", [1] * 9, 1.0, 8.0), RequestRun("a", [1] * 9, first_s, decode_s)
        runs.rounds.append({arm: GroupRun((run,), 0.0, 0) for arm, run in
                            (("off", off), ("no candidate", off), ("head x", late), ("head x 8x1", late))})  # fmt: skip
    drafter: Any = SimpleNamespace(drafters=[SimpleNamespace(name="head")])
    row = DraftsReport({}, [Candidate("head x", drafter, 1.0)], runs).figures()["head x"]
    assert row["faster_on"] == 1
    assert row["ratio"] == rounded(16.0 / 19.0)


def test_the_target_is_loaded_once_and_heads_share_its_states(loaded: tuple[EngineParts, list[Candidate]]) -> None:
    base, candidates = loaded
    assert {id(candidate.parts.decoder) for candidate in candidates} == {id(base.decoder)}
    assert len(base.decoder.aux_layers) == 2  # type: ignore[attr-defined]


def refused(*words: str) -> str:
    done = CliRunner().invoke(cli, ["bench", "drafts", "--target", str(folders()["target"]), *words])
    assert done.exit_code != 0
    return str(done.exception) if isinstance(done.exception, BenchError) else done.output


def test_bad_candidates_are_refused_by_the_name_of_their_option(tmp_path: Path) -> None:
    assert "--head, --draft: nothing to compare" in refused()
    wide = head_tensors(128, 384, 200)
    other = write_head(tmp_path / "other", head_config(384, 200, **{AUX: [0, 1, 1]}), wide)
    said = refused("--head", str(other))
    assert f"--head {other}: " in said
    assert "trained for this target" in said
    assert "--head ./nowhere: " in refused("--head", "./nowhere")
    assert "--draft ./nowhere: " in refused("--draft", "./nowhere")
    fit = head(tmp_path / "fit", [0, 1, 1])
    assert f"--draft {fit}: a feature head; give it by --head" in refused("--draft", fit)
    model = str(folders()["target"])
    with pytest.raises(BenchError, match=f"--head {model}: "):
        load_candidates(config(), [model], [])


def test_a_candidate_that_is_named_twice_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, object]] = []

    def load(config: object, heads: object, drafts: object, progress: object) -> None:
        asked.append((heads, drafts))
        raise BenchError("enough")

    monkeypatch.setattr(drafts_bench, "load_candidates", load)
    refused("--head", "b", "--draft", "a", "--head", "a", "--head", "b", "--draft", "a")
    assert asked == [(("b", "a"), ("a",))]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["{}\n"], "line 1: .*exactly one of prompt, "),
        ([{"prompt": "a"}, "{\n"], "line 2: .*Invalid JSON"),
        ([{"prompt": "a"}, {"messages": [{"role": "user"}]}], r"line 2: messages\.0\.content: Field required"),
        ([{"prompt": "a", "max_tokens": 0}], "line 1: max_tokens: Input should"),
        ([{"prompt": "a"}], "1 prompts; give two or more"),
        (
            [{"prompt": "a"}, {"prompt_blocks": [], "prompt_tokens": 9}],
            "line 2: no text; capture with --capture-prompts",
        ),
        (['{"prompt": "a\u2028b"}\n'], "1 prompts; give two or more"),  # ends no line
    ],
)
def test_a_bad_line_is_named(
    loaded: tuple[EngineParts, list[Candidate]], tmp_path: Path, lines: list[object], problem: str
) -> None:
    with pytest.raises(BenchError, match=f"--prompts-file.*{problem}"):
        file_prompts(prompts(tmp_path, *lines), loaded[0].tokenizer, 8, None)


def test_captured_prompts_keep_their_tokens(loaded: tuple[EngineParts, list[Candidate]], tmp_path: Path) -> None:
    lines = [{"offset_s": 1.7e9, "prompt_ids": [5, 6]}, {"offset_s": 1.8e9, "prompt_ids": [7], "prediction_ids": [8]}]
    lines[1] |= {"fixed": True, "stop": ["x"]}
    (first,), (second,) = file_prompts(prompts(tmp_path, *lines), loaded[0].tokenizer, 8, 9).groups
    assert (first.ids, first.counted) == ((5, 6), False)
    assert (second.ids, second.prediction, second.max_tokens) == ((7,), (8,), 9)
    assert (second.stopping.ignore_eos, second.stopping.stop) == (True, ("x",))


def test_a_missing_file_of_prompts_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    words = ["bench", "drafts", "--target", str(tmp_path / "none"), "--prompts-file", str(tmp_path / "prompts")]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 2
    assert "--prompts-file" in result.stderr
