"""What is compiled, what is rejected and how, and that no grammar ends the process."""

from __future__ import annotations

import json
import os
import sys
import threading

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from specdec.core.types import GrammarKind, GrammarParams
from specdec.errors import InvalidRequestError, QueueFullError
from specdec.grammar import compiler as grammar_compiler
from specdec.grammar.check_process import grammar_source
from specdec.grammar.compiler import GrammarCompiler
from specdec.models.tokenizer import Tokenizer, TokenizerInfo
from tests.grammar.helpers import EOS, byte_level, compiled, compiler, finished, ids_of, start
from tests.models.tiny import VOCAB_SIZE

KIND = GrammarKind


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (KIND.JSON_SCHEMA, '{"type": "thing"}', "Invalid type: thing"),
        (KIND.JSON_SCHEMA, "[1]", "must be a JSON object"),
        (KIND.JSON_SCHEMA, "true", "must be a JSON object"),
        (KIND.JSON_SCHEMA, '{"type": ', "not JSON"),
        (KIND.JSON_SCHEMA, "[" * 50_000, "recursion"),
        (KIND.JSON_SCHEMA, '{"$ref": "http://localhost/schema"}', "http://localhost/schema"),
        (KIND.REGEX, "(a", "unclosed group"),
        (KIND.REGEX, "[a&&b]", "nothing matches"),
        (KIND.REGEX, "(" * 5000 + ")" * 5000, "regex"),
        (KIND.EBNF, "start: missing", "missing"),
        (KIND.EBNF, "root ::= missing", "missing"),
        (KIND.EBNF, "neither this nor that", "::="),
        (KIND.CHOICE, "[]", "array of at least one string"),
        (KIND.CHOICE, '["a", 1]', "array of at least one string"),
        (KIND.CHOICE, '"a"', "array of at least one string"),
        (KIND.CHOICE, "a, b", "not JSON"),
        (KIND.CHOICE, r'["\ud800"]', "surrogate"),
    ],
)
def test_a_bad_grammar_is_rejected_by_name(kind: GrammarKind, text: str, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        compiled(compiler(), GrammarParams(kind, text))
    (violation,) = caught.value.violations
    assert violation.field == "grammar"
    assert message in violation.description
    assert len(violation.description) < 400
    assert "\n" not in violation.description


def test_deep_recursion_of_a_grammar_does_not_end_the_process() -> None:
    """Rules that lead to rules overflowed a thread's usual stack of 8 MiB: a segmentation fault."""
    deep = "".join(f"s{i}: s{i + 1}\n" for i in range(5000)) + 's5000: "a"\nstart: s0'
    assert ids_of(start(GrammarParams(KIND.EBNF, deep)).mask(())) == byte_level().encode("a")
    links = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1500)} | {"d1500": {"type": "null"}}
    start(GrammarParams(KIND.JSON_SCHEMA, json.dumps({"$defs": links, "$ref": "#/$defs/d0"})))


@pytest.mark.parametrize("kind", [KIND.JSON_OBJECT, KIND.JSON_SCHEMA])
def test_json_white_space_is_bounded(kind: GrammarKind) -> None:
    params = GrammarParams(kind, '{"type": "object"}' if kind is KIND.JSON_SCHEMA else "")
    for text in ('{"a":1,"b":[2,{}]}', '{"a": 1, "b": [2, {}]}', json.dumps({"a": 1, "b": [2, {"c": []}]}, indent=8)):
        state = start(params)
        state.commit(byte_level().encode(text))
        assert finished(state)
    for blanks, most in ((" ", 1), ("\n", 2), ("\n" + "\t" * 60, 41), ("\r", 0)):
        state, held = start(params), 0
        state.commit(byte_level().encode('{"a":'))
        for character in blanks * 3:
            (token,) = byte_level().encode(character)
            if token not in ids_of(state.mask(())):
                break
            state.commit([token])
            held += 1
        assert held == most


def test_a_schema_may_set_the_separators_of_its_tokens() -> None:
    def allows(options: dict[str, object], text: str) -> bool:
        schema = {"type": "object", "x-guidance": options}
        state = start(GrammarParams(KIND.JSON_SCHEMA, json.dumps(schema)))
        for token in byte_level().encode(text):
            if token not in ids_of(state.mask(())):
                return False
            state.commit([token])
        return True

    for options, wanted in (
        ({"whitespace_flexible": False}, (True, False, False)), ({"whitespace_flexible": True}, (True, True, False)),
        ({"whitespace_pattern": " {0,9}"}, (True, True, True)), ({}, (True, True, False)),
    ):  # fmt: skip
        assert tuple(allows(options, text) for text in ('{"a":1}', '{"a": 1}', '{"a":      1}')) == wanted


def test_thousands_of_choices_and_every_character() -> None:
    state = start(GrammarParams(KIND.CHOICE, json.dumps([f"option {i}" for i in range(6000)])))
    state.commit(byte_level().encode("option 599"))
    assert EOS in ids_of(state.mask(()))
    for text in ('"\\/\n\t\x00\x7f', "😀 é", "start: x", " "):
        state = start(GrammarParams(KIND.CHOICE, json.dumps([text])))
        state.commit(byte_level().encode(text))
        assert finished(state)


DOUBLING = "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(15)) + 'r15 ::= "a" | ""'
"""A short grammar that the library compiles for longer than anybody waits, and takes gigabytes for."""


def test_a_grammar_that_never_compiles_is_rejected_once_and_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = GrammarCompiler(byte_level(), VOCAB_SIZE, check_seconds=0.2)
    with pytest.raises(InvalidRequestError, match=r"grammar: too complex: it .*; correct or simplify the grammar"):
        compiled(ours, GrammarParams(KIND.EBNF, DOUBLING))
    assert compiled(ours, GrammarParams(KIND.REGEX, "quick")).mask(()).any()
    monkeypatch.setattr(grammar_compiler.CheckProcess, "check", lambda *_: pytest.fail("checked again"))
    with pytest.raises(InvalidRequestError, match="too complex"):
        ours.start(GrammarParams(KIND.EBNF, DOUBLING), "").result()
    ours.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [("CHECK_WALL_SECONDS", 0.0), ("module_command", lambda _: [sys.executable, "-c", "raise ImportError"])],
    ids=["killed", "broken"],
)
def test_a_check_that_ends_by_itself_rejects_no_grammar_permanently(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, quick = GrammarCompiler(byte_level(), VOCAB_SIZE), GrammarParams(KIND.REGEX, "quick")
    monkeypatch.setattr(grammar_compiler, name, value)
    with pytest.raises(OSError, match="the process that checks grammars ended with status"):
        compiled(ours, quick)
    monkeypatch.undo()
    assert compiled(ours, quick).mask(()).any()
    ours.close()


def test_close_ends_running_checks_and_cancels_queued_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, began = GrammarCompiler(byte_level(), VOCAB_SIZE, check_seconds=600.0), threading.Event()
    started = grammar_compiler.CheckProcess._start
    monkeypatch.setattr(grammar_compiler.CheckProcess, "_start", lambda it: (started(it), began.set())[0])
    first = ours.start(GrammarParams(KIND.EBNF, DOUBLING), "")
    others = [ours.start(GrammarParams(KIND.REGEX, f"a{i}"), "") for i in range(3)]
    assert began.wait(60)
    ours.close()
    assert isinstance(first.exception(0), OSError)
    assert all(other.cancelled() for other in others)
    assert not [thread for thread in threading.enumerate() if thread.name == "specdec-grammar"]
    assert ours._check_process._process is None
    assert compiled(ours, GrammarParams(KIND.REGEX, "a1")).mask(()).any()
    ours.close()


def test_a_thread_that_does_not_start_fails_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ours, quick = GrammarCompiler(byte_level(), VOCAB_SIZE), GrammarParams(KIND.REGEX, "quick")
    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(RuntimeError, match="start new thread"):
        ours.start(quick, "")
    ours.close()
    monkeypatch.undo()
    assert ours.state(ours.start(quick, "")).mask(()).any()
    ours.close()


def test_a_panic_of_the_library_rejects_its_grammar_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicError(BaseException):
        """As Rust's bindings raise it."""

    def panic(*_: object) -> None:
        raise PanicError("index out of bounds")

    ours, quick = GrammarCompiler(byte_level(), VOCAB_SIZE), GrammarParams(KIND.REGEX, "quick")
    monkeypatch.setattr(grammar_compiler, "compile_matcher", panic)
    with pytest.raises(InvalidRequestError, match="index out of bounds"):
        compiled(ours, quick)
    ours.close()


def test_a_check_process_that_ended_while_idle_is_replaced() -> None:
    ours = GrammarCompiler(byte_level(), VOCAB_SIZE)
    compiled(ours, GrammarParams(KIND.REGEX, "a"))
    process = ours._check_process._process
    assert process is not None
    process.kill()
    process.wait()
    compiled(ours, GrammarParams(KIND.REGEX, "b"))
    checks = ours._check_process
    assert checks._process is not None
    checks.interrupt()  # the compiler is closed: a check that is about to begin does not start another process
    checks._process.wait()
    with pytest.raises(OSError, match="send the request again"):
        checks.check(GrammarParams(KIND.REGEX, "c"), 1.0)
    ours.close()


def test_the_memory_of_a_check_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "CHECK_WALL_SECONDS", 600.0)
    ours = GrammarCompiler(byte_level(), VOCAB_SIZE, check_seconds=600.0)
    with pytest.raises(InvalidRequestError, match="too much memory"):
        compiled(ours, GrammarParams(KIND.EBNF, DOUBLING))
    ours.close()


def test_compiled_grammars_are_cached_and_the_oldest_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    check = grammar_compiler.CheckProcess.check

    def noted(process: grammar_compiler.CheckProcess, params: GrammarParams, cpu_seconds: float) -> str:
        checked.append(params.text)
        return check(process, params, cpu_seconds)

    monkeypatch.setattr(grammar_compiler.CheckProcess, "check", noted)
    monkeypatch.setattr(grammar_compiler, "MAX_CACHED", 2)
    ours = GrammarCompiler(byte_level(), VOCAB_SIZE)
    for text in ("a", "b", "a", "c", "a", "b"):
        compiled(ours, GrammarParams(KIND.REGEX, text))
    assert checked == ["a", "b", "c", "b"]


def test_keys_are_served_in_turn_and_none_fills_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, order, began = threading.Event(), list[str](), threading.Event()

    def gated(process: grammar_compiler.CheckProcess, params: GrammarParams, cpu_seconds: float) -> str:
        began.set()
        assert gate.wait(60)
        order.append(params.text)
        return grammar_source(params)

    monkeypatch.setattr(grammar_compiler.CheckProcess, "check", gated)
    monkeypatch.setattr(grammar_compiler, "MAX_PENDING_PER_KEY", 8)
    ours = GrammarCompiler(byte_level(), VOCAB_SIZE)
    first = ours.start(GrammarParams(KIND.REGEX, "a0"), "a")
    assert began.wait(60)
    most = grammar_compiler.MAX_PENDING_PER_KEY
    futures = [ours.start(GrammarParams(KIND.REGEX, f"a{i}"), "a") for i in range(1, most + 1)]
    assert ours.start(GrammarParams(KIND.REGEX, "a1"), "a") is futures[0]
    with pytest.raises(QueueFullError, match="8 grammars of one key"):
        ours.start(GrammarParams(KIND.REGEX, "more"), "a")
    futures.pop().cancel()  # its caller has left, so there is room
    futures.append(ours.start(GrammarParams(KIND.REGEX, f"a{most}"), "a"))
    futures += [ours.start(GrammarParams(KIND.REGEX, f"b{i}"), "b") for i in range(2)]
    gate.set()
    for future in [first, *futures]:
        assert ours.state(future).mask(()).any()
    assert order[:5] == ["a0", "a1", "b0", "a2", "b1"]


def test_cancelled_grammars_of_other_keys_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client chooses the key, so that one which leaves at once could keep any number of texts waiting."""
    gate, began = threading.Event(), threading.Event()

    def gated(process: grammar_compiler.CheckProcess, params: GrammarParams, cpu_seconds: float) -> str:
        began.set()
        assert gate.wait(60)
        return grammar_source(params)

    monkeypatch.setattr(grammar_compiler.CheckProcess, "check", gated)
    ours = GrammarCompiler(byte_level(), VOCAB_SIZE)
    first = ours.start(GrammarParams(KIND.REGEX, "a"), "a")
    assert began.wait(60)
    for number in range(50):
        ours.start(GrammarParams(KIND.REGEX, f"b{number}"), f"salt {number}").cancel()
    assert list(ours._jobs) == ["salt 49"]
    gate.set()
    assert ours.state(first).mask(()).any()


def test_use_does_not_change_a_cached_grammar() -> None:
    params = GrammarParams(KIND.CHOICE, '["one", "two"]')
    first = start(params)
    first.commit(byte_level().encode("one"))
    assert finished(first)
    assert not finished(start(params))


def test_a_long_forced_text_is_split_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, lengths, text = byte_level(), list[int](), "hello world " * 300
    encode = Tokenizer.encode

    def noted(its: Tokenizer, part: str, **options: bool) -> list[int]:
        lengths.append(len(part))
        return encode(its, part, **options)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    ours, written = GrammarCompiler(tokenizer, VOCAB_SIZE), list[int]()
    state = compiled(ours, GrammarParams(KIND.EBNF, f'start: "{text}"'))
    while not finished(state):
        forced = [token for token in state.forced((), 16) if token != EOS]
        state.commit(forced)
        written += forced
    assert b"".join(map(tokenizer.token_bytes, written)).decode() == text
    assert 0 < max(lengths) <= grammar_compiler.MAX_FORCED_CHARACTERS + 1
    ours.close()


def test_a_text_that_the_tokenizer_changes_is_spelled_by_its_longest_tokens() -> None:
    data = json.loads(byte_level()._backend.to_str()) | {"normalizer": {"type": "NFC"}}
    ours = GrammarCompiler(Tokenizer(json.dumps(data), TokenizerInfo(eos_ids=(EOS,))), VOCAB_SIZE)
    text = "e\u0301"
    assert ours._tokenizer.encode_inside(text) == []
    state = compiled(ours, GrammarParams(KIND.CHOICE, json.dumps([text])))
    written = state.forced((), 8)
    assert b"".join(map(ours._tokenizer.token_bytes, written[:-1])) == text.encode()
    assert written[-1] == EOS
    ours.close()


def test_unusable_allowed_ids_are_rejected() -> None:
    params, a = GrammarParams(KIND.REGEX, "a+"), byte_level().encode("a")[0]
    compiled(compiler(), params, (a, EOS))
    for allowed, message in (((a,), "end token"), ((a + 1, EOS), "none of them can begin")):
        with pytest.raises(InvalidRequestError) as caught:
            compiled(compiler(), params, allowed)
        assert caught.value.violations[0].field == "sampling.allowed_token_ids"
        assert message in caught.value.violations[0].description


class Panic(BaseException):
    """As the library's, which is no Exception."""


@pytest.mark.parametrize("kind", [RuntimeError, Panic])
def test_a_vocabulary_without_grammar_support_does_not_prevent_a_start(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise kind("injected")

    monkeypatch.setattr(grammar_compiler, "GrammarVocabulary", broken)
    ours = GrammarCompiler(byte_level(), VOCAB_SIZE)
    ours.prepare()
    ours.wait_until_prepared()
    assert "do not work with this vocabulary: injected" in caplog.text
    assert isinstance(ours.prepare().exception(), Exception)  # any other would end the engine
    with pytest.raises(RuntimeError if kind is RuntimeError else InvalidRequestError, match="injected"):
        compiled(ours, GrammarParams(KIND.JSON_OBJECT))


def test_a_model_without_an_end_token_cannot_be_constrained() -> None:
    endless = Tokenizer(byte_level()._backend.to_str(), TokenizerInfo(eos_ids=(VOCAB_SIZE + 5,)))
    ours = GrammarCompiler(endless, VOCAB_SIZE)
    ours.prepare().result()
    assert ours.healing("ab").mask(()).any()
    with pytest.raises(InvalidRequestError, match="end token"):
        compiled(ours, GrammarParams(KIND.JSON_OBJECT))


@pytest.mark.parametrize("pieces", [["!", "a", "!=", "{", "}"], ["!", "!=", "a"]], ids=["all", "no braces"])
def test_words_are_healed_in_any_vocabulary(pieces: list[str]) -> None:
    """One without an end token, whose first token is text, and one in which JSON cannot be written."""
    backend = Backend(models.BPE({piece: token for token, piece in enumerate(pieces)}, []))
    backend.decoder = decoders.ByteLevel()
    ours = GrammarCompiler(Tokenizer(backend.to_str(), TokenizerInfo()), len(pieces))
    ours.prepare().result()
    assert ids_of(ours.healing("!").mask(())) == [pieces.index("!"), pieces.index("!=")]


def test_the_thread_only_lowers_its_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered = list[int]()
    monkeypatch.setattr(os, "setpriority", lambda *_: None)  # might raise that of a niced server, which fails
    monkeypatch.setattr(os, "nice", lowered.append)
    GrammarCompiler(byte_level(), VOCAB_SIZE).prepare().result()
    assert lowered == [10]


def test_several_end_tokens_are_all_allowed() -> None:
    both = Tokenizer(byte_level()._backend.to_str(), TokenizerInfo(eos_ids=(EOS, 0)))
    state = compiled(GrammarCompiler(both, VOCAB_SIZE), GrammarParams(KIND.CHOICE, '["a"]'))
    state.commit(byte_level().encode("a"))
    assert ids_of(state.mask(())) == [0, EOS]
    assert state.forced((), 3) == [EOS]
    assert ids_of(state.mask([0])) == [0, EOS]
