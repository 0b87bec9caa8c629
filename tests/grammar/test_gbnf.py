"""GBNF against what llama.cpp accepts: oracles, strings of each construct, and llama.cpp's own grammars."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

import pytest
from llguidance import LLMatcher, LLTokenizer

from specdec.core.types import GrammarKind, GrammarParams
from specdec.grammar.check_process import compile_matcher, grammar_source
from specdec.grammar.gbnf import gbnf_to_lark, is_gbnf
from tests.grammar.helpers import EOS, byte_level, ids_of, start


@functools.cache
def vocabulary() -> LLTokenizer:
    return LLTokenizer("byte")


def compiled(text: str) -> LLMatcher:
    return compile_matcher(grammar_source(GrammarParams(GrammarKind.EBNF, text)), vocabulary())


def accepts(text: str, output: str) -> bool:
    matcher, ids = compiled(text), list(output.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def accepted(matcher: LLMatcher, alphabet: str, longest: int, written: str = "") -> Iterator[str]:
    """Every output of at most ``longest`` characters that ``matcher`` accepts."""
    if matcher.is_accepting():
        yield written
    for character in alphabet if len(written) < longest else "":
        further = matcher.deep_copy()
        if further.try_consume_tokens([ord(character)]) == 1:
            yield from accepted(further, alphabet, longest, written + character)


def matching(pattern: str, alphabet: str, longest: int) -> set[str]:
    found, every = set(), [""]
    for _ in range(longest + 1):
        found |= {text for text in every if re.fullmatch(pattern, text)}
        every = [text + character for text in every for character in alphabet]
    return found


ARITHMETIC = r"""root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
_ATOM = r"(?:(?:a[a1]*|1+)\n*|\(\n*(?:a[a1]*|1+)\n*\)\n*)"


@pytest.mark.parametrize(
    ("text", "pattern", "alphabet", "longest"),
    [
        ('root ::= digits "0"\ndigits ::= [0-9]+', "[0-9]+0", "012a", 4),
        ('root ::= path ".py"\npath ::= [a-z./]+', r"[a-z./]+\.py", "apy./", 5),
        ('root ::= word "b"\nword ::= [a-z]+', "[a-z]+b", "abc", 4),
        ('root ::= ("a" | "ab") "bc"?', "(a|ab)(bc)?", "abc", 5),
        ('root ::= ws "{" ws "}" ws "\\n"\nws ::= [ \\n]*', r"[ \n]*\{[ \n]*\}[ \n]*\n", "{} \n", 5),
        ('root ::= x{2} y{1,2} z{1,}\nx ::= "a"\ny ::= "a" | ""\nz ::= "b"', "aa(a|){1,2}b+", "ab", 6),
        ('root ::= . "x"', "(?s:.)x", "x\n", 3),
        (ARITHMETIC, rf"({_ATOM}(\+{_ATOM})*=\n*{_ATOM}\n)+", "a1=+()\n", 6),
        ('root ::= "(" root ")" | ws num ws "1"\nnum ::= [0-9]+ ws\nws ::= " "*', r" *\d+ *1|\( *\d+ *1\)", "(1 )", 5),
    ],
)
def test_exactly_the_outputs_of_the_grammar_are_accepted(text: str, pattern: str, alphabet: str, longest: int) -> None:
    assert set(accepted(compiled(text), alphabet, longest)) == matching(pattern, alphabet, longest)


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        (r'root ::= "\u00e9\u0041\x42\U0001F600\t"', "éAB😀\t", "ÉAB😀\t"),
        (r"root ::= [\u0041-\u005A\x61\U0001F600-\U0001F64F]+", "AZa😁", "b"),
        (r"root ::= [^\n\u0041]+", "é\tB", "A"),
        (r'root ::= [-+*/]+ [\]\[a\-z]* "\"\\[]-/"', '+-/]a-z["\\[]-/', '+b"\\[]-/'),
        ("root ::= [a-z&&b]+ [c~~d]", "z&~", "z&!"),
        ("root ::= [+--]+ [a-]", "+,--", "*-"),
        ('root ::= start\nstart ::= "a"', "a", "b"),
        ('root ::= fooBar\nfooBar ::= foo_bar Foo-Bar\nfoo_bar ::= "1"\nFoo-Bar ::= foo-bar\nfoo-bar ::= "2"',
         "12", "1"),
        ('# start: a comment\nroot ::= "#" # "x"\n', "#", "x"),
        ('root ::= ("a" | # "b"\n "c")+ "::= start: "?', "cac::= start: ", "b"),
        ('root ::= "x\nstart: y"', "x\nstart: y", "x"),
        ('root ::= ""', "", "a"),
        ('root ::= "a"\nroot ::= "b"', "b", "a"),
        ('root ::= "a"\r\n\r\nother ::= "b"\r\n', "a", "b"),
    ],
)  # fmt: skip
def test_texts_and_names_mean_what_they_mean_to_llama_cpp(text: str, good: str, bad: str) -> None:
    assert accepts(text, good)
    assert not accepts(text, bad)


JSON = r"""root   ::= ws value
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ws ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""


def test_a_recursive_grammar_keeps_its_long_lexemes() -> None:
    """With a lexeme per character, a mask within a string would exceed the library's limit of items."""
    lark = gbnf_to_lark(JSON)
    for text in ('{"a": [1, -2.5e3 , true],\n "b\\n": {"c":"\\u00e9 é"}}\n', "[]", " 12", "[1 \n,2]"):
        assert accepts(JSON, text)
    for text in ('{"a" 1}', "[1,]", "01", "[1,2"):
        assert not accepts(JSON, text)
    name = next(line.split(":")[0] for line in lark.splitlines() if line.startswith("T") and "bfnrt" in line)
    assert re.search(rf"^L\d+: {name}$", lark, re.MULTILINE)


def test_the_end_is_reached_after_arithmetic() -> None:
    state = start(GrammarParams(GrammarKind.EBNF, ARITHMETIC))
    state.commit(byte_level().encode("a=1\n"))
    assert EOS in ids_of(state.mask(()))


def test_the_number_of_rules_is_not_limited() -> None:
    names = [f"r{i};" for i in range(1000)]
    rules = [f'{name[:-1]} ::= "{name}" ("(" root ")")?' for name in names]
    assert accepts("\n".join(["root ::= " + " | ".join(names).replace(";", ""), *rules]), "r7;(r999;)")


def test_lark_stays_lark() -> None:
    for text in (
        'start: "a::=b"',
        '// root ::= "a"\nstart: "b"',
        "%llguidance {}\nstart: /x ::=/",
        "start : A\nA: /::=/",
    ):
        assert not is_gbnf(text)
        assert grammar_source(GrammarParams(GrammarKind.EBNF, text)) == LLMatcher.grammar_from_lark(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (r'root ::= "\d"', r"unknown escape \d"),
        (r'root ::= "\u12"', r"unknown escape \u"),
        ('other ::= "a"', "no rule 'root'"),
        ("root ::= a-b", "rule 'a-b' is missing"),
    ],
)
def test_a_malformed_grammar_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        grammar_source(GrammarParams(GrammarKind.EBNF, text))
