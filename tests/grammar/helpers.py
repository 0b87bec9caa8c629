"""Tokenizers, compilers and an oracle for grammar tests."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from specdec.core.types import GrammarKind, GrammarParams
from specdec.grammar.check_process import grammar_source
from specdec.grammar.compiler import GrammarCompiler, GrammarVocabulary
from specdec.grammar.state import GrammarState
from specdec.models.tokenizer import Tokenizer, TokenizerInfo
from tests.models.tiny import VOCAB_SIZE, make_tiny_tokenizer

EOS = 2
PERSON = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["person", "pet"]},
        "name": {"type": "string", "pattern": "^[a-z]{1,4}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["kind", "name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMARS = (
    GrammarParams(GrammarKind.JSON_SCHEMA, json.dumps(PERSON)),
    GrammarParams(GrammarKind.JSON_OBJECT),
    GrammarParams(GrammarKind.REGEX, r"(ab|the )*[0-9]{1,3}é?"),
    GrammarParams(GrammarKind.CHOICE, '["a", "an", "and so on", "über", ""]'),
    GrammarParams(GrammarKind.EBNF, 'start: sum\nsum: /[0-9]+/ | sum "+" sum | "(" sum ")"'),
    GrammarParams(GrammarKind.EBNF, 'root ::= "for" " " word+\nword ::= [a-z]+ ";"?'),
    GrammarParams(GrammarKind.EBNF, 'start: "in" <|im_start|> "out" /x*/'),
    GrammarParams(GrammarKind.EBNF, 'start: <[100]> <[100]> <[101]> ("a" | <[300]> <[301]>) /x*/'),
    GrammarParams(
        GrammarKind.EBNF, 'start: "a" (on | off)\non[lazy]: /(?s:.*)e *a/\noff[lazy]: /(?s:.*)e *n/ & ~/.*ea.*/'
    ),
    GrammarParams(GrammarKind.EBNF, 'start: "before the mark " <|im_start|> ("a" | "b") <|im_start|> /x*/'),
)


@functools.cache
def byte_level() -> Tokenizer:
    """The tiny models' tokenizer: 376 tokens, of which 2 is EOS and 0 to 2 are special."""
    folder = Path(tempfile.mkdtemp(prefix="specdec-test-"))
    make_tiny_tokenizer(folder)
    return Tokenizer((folder / "tokenizer.json").read_text(), TokenizerInfo(eos_ids=(EOS,)))


@functools.cache
def sentence_piece() -> Tokenizer:
    """A tokenizer of the SentencePiece kind: it adds a space before every text, and has byte tokens in addition to
    characters."""
    pieces = ["<s>", "<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefno,1:{}\"'", "é"]
    pieces += ["an", "and", "▁a", "▁an", "▁and"]
    vocabulary = {piece: token for token, piece in enumerate(pieces)}
    merges = [("a", "n"), ("an", "d"), ("▁", "a"), ("▁a", "n"), ("▁an", "d")]
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "<unk>", "</s>")])
    return Tokenizer(backend.to_str(), TokenizerInfo(eos_ids=(EOS,)))


@functools.cache
def compiler(vocab_size: int = VOCAB_SIZE, pieces: bool = False) -> GrammarCompiler:
    return GrammarCompiler(sentence_piece() if pieces else byte_level(), vocab_size)


def start(params: GrammarParams, vocab_size: int = VOCAB_SIZE) -> GrammarState:
    return compiled(compiler(vocab_size), params)


def compiled(ours: GrammarCompiler, params: GrammarParams, allowed_token_ids: Sequence[int] = ()) -> GrammarState:
    """Compile a grammar and wait for it."""
    return ours.state(ours.start(params, ""), allowed_token_ids)


def finished(state: GrammarState) -> bool:
    """Whether the text is complete and nothing but the end token can follow."""
    return ids_of(state.mask(())) == [EOS]


def ids_of(mask: NDArray[np.uint32]) -> list[int]:
    """The tokens whose bits are set."""
    return np.flatnonzero(np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little")).tolist()


@functools.cache
def _library(vocab_size: int, pieces: bool) -> LLTokenizer:
    tokenizer = sentence_piece() if pieces else byte_level()
    return LLTokenizer(GrammarVocabulary(tokenizer, vocab_size, (EOS,)), n_vocab=vocab_size, eos_token=[EOS])


def allowed_by_trial(
    params: GrammarParams, path: Sequence[int], vocab_size: int = VOCAB_SIZE, pieces: bool = False
) -> list[int]:
    """Tokens that may follow ``path``: every token of the vocabulary, tried on a matcher that never computed a mask."""
    matcher = LLMatcher(_library(vocab_size, pieces), grammar_source(params), log_level=0)
    if EOS in path or matcher.try_consume_tokens(list(path)) != len(path):
        after_end = EOS in path and set(path[path.index(EOS) :]) == {EOS}
        before = path[: path.index(EOS)] if after_end else path
        return [EOS] if after_end and EOS in allowed_by_trial(params, before, vocab_size, pieces) else []
    text = [token for token in range(vocab_size) if token != EOS and matcher.deep_copy().consume_token(token)]
    return sorted([*text, *([EOS] if matcher.is_accepting() else [])])


def check_mask(mask: list[int], possible: list[int], forced: list[int], tokenizer: Tokenizer) -> None:
    """Check that ``mask`` is all that is ``possible`` or, for forced text, the first of its tokens."""
    if mask == possible:
        return
    assert len(mask) == 1
    assert mask == forced[:1]
    assert mask[0] in possible
    longest = max((tokenizer.token_bytes(token) for token in possible), key=len)
    assert all(longest.startswith(tokenizer.token_bytes(token)) for token in possible)
