"""llama.cpp's GBNF, as llguidance's Lark dialect.

The library's lexer takes the longest match of a lexeme, never a shorter one: if ``digits`` is a lexeme, ``digits "0"``
matches nothing. Its own converter makes every rule without recursion a lexeme. Here a lexeme is as large as possible,
because masks then cost least, but never so large that it takes what must follow it.
"""

from __future__ import annotations

import re
from functools import cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import (
    ASTNode,
    GrammarParser,
    LiteralNode,
    RegexNode,
    RepetitionNode,
    RuleNode,
    RuleRefNode,
    SequenceNode,
    is_lark_syntax,
)

_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_CHARACTER = r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\.|[^\\]"
_CHARACTERS = re.compile(_CHARACTER, re.DOTALL)
_RANGES = re.compile(rf"({_CHARACTER})(?:(-)({_CHARACTER}))?", re.DOTALL)
_TEXTS = re.compile(r'("(?:\\.|[^"\\])*")|(\[(?:\\.|[^\]\\])*\])|(#[^\r\n]*)|\.', re.DOTALL)
_ESCAPES = {r"\t": "\t", r"\r": "\r", r"\n": "\n"} | {"\\" + c: c for c in '\\"[]-'}
_ANY = "[\\x00-\U0010ffff]"  # in Lark and in regular expressions, a dot is no line feed
_REST = "/(?s:.*)/"
_FUEL = 50_000  # of the library, to compare a lexeme with what follows: some 10 ms


def is_gbnf(text: str) -> bool:
    """Whether an EBNF grammar is GBNF, not Lark. A rule of GBNF may be named ``start``."""
    return _RULE.search(text) is not None or not is_lark_syntax(text)


def gbnf_to_lark(text: str) -> str:
    """The same grammar in Lark.

    Where a rule refers to itself, lexemes that may begin at the same place still compete: the longest match wins.

    Raises:
        ValueError: the text is malformed.
    """
    return _Conversion(text).lark()


def _plain(text: str) -> str:
    """The grammar without comments, its characters written so that the library's parser and Lark read them as llama.cpp
    does."""

    def rewritten(found: re.Match[str]) -> str:
        literal, ranges, comment = found.groups()
        if literal is not None:
            return '"' + _CHARACTERS.sub(lambda one: _escaped(one[0]), literal[1:-1]) + '"'
        if ranges is not None:
            negation = "^" if ranges.startswith("[^") else ""
            inner = _RANGES.sub(_range, ranges[1 + len(negation) : -1])
            return f"[{negation}{inner}]"
        return "" if comment is not None else _ANY

    return _TEXTS.sub(rewritten, text)


def _range(found: re.Match[str]) -> str:
    first, dash, last = found.groups()
    return _escaped(first) + (dash + _escaped(last) if dash else "")


def _escaped(character: str) -> str:
    if len(character) > 2:
        plain = chr(int(character[2:], 16))
    elif character.startswith("\\"):
        if character not in _ESCAPES:
            raise ValueError(f"unknown escape {character}")
        plain = _ESCAPES[character]
    else:
        plain = character
    return plain if plain.isalnum() or ord(plain) >= 0x80 else f"\\x{ord(plain):02x}"


@cache
def _byte_vocabulary() -> LLTokenizer:
    return LLTokenizer("byte")


class _Conversion:
    """The conversion of one grammar.

    ``begins`` and ``follow``, what a part may begin with and what may follow it, are sets of Lark texts that match one
    character.
    """

    def __init__(self, text: str) -> None:
        self._rules: dict[str, RuleNode] = GrammarParser().parse(_plain(text))
        if "root" not in self._rules:
            raise ValueError("no rule 'root'")
        for rule in self._rules.values():
            self._resolve(rule)
        while found := [r for r in self._rules.values() if not r.rule_is_terminal and r.alternatives.is_terminal()]:
            for rule in found:
                rule.rule_is_terminal = True
        for number, rule in enumerate(self._rules.values()):
            rule.name = f"{'T' if rule.rule_is_terminal else 'r'}{number}"
        self._terminals = "".join(f"{r.name}: {r.alternatives}\n" for r in self._rules.values() if r.rule_is_terminal)
        self._recursive = {name: rule for name, rule in self._rules.items() if not rule.rule_is_terminal}
        self._begins: dict[str, tuple[frozenset[str], bool]] = dict.fromkeys(self._rules, (frozenset(), False))
        self._follows: dict[str, frozenset[str]] = dict.fromkeys(self._recursive, frozenset())
        self._lexemes: dict[str, str] = {}
        self._known: dict[tuple[str, frozenset[str]], bool] = {}  # answers of `_is_safe`

    def lark(self) -> str:
        """The grammar in Lark: `_begins` and `_follows` grow until nothing is added, then the rules are written."""
        before: object = None
        while before != self._begins:
            before = dict(self._begins)
            for name, rule in reversed(self._rules.items()):
                self._begins[name] = self._beginning(rule.alternatives)
        while before != self._follows:
            before = dict(self._follows)
            for name, rule in self._recursive.items():
                self._note_follows(rule.alternatives, self._follows[name])
        parsed = [
            f"{rule.name}: {self._parsed(rule.alternatives, self._follows[name])}\n"
            for name, rule in self._recursive.items()
        ]
        lexemes = [f"{name}: {text}\n" for text, name in self._lexemes.items()]
        return "".join([f"start: {self._rules['root'].name}\n", *parsed, self._terminals, *lexemes])

    def _resolve(self, node: ASTNode) -> None:
        if isinstance(node, RuleRefNode):
            if node.name not in self._rules:
                raise ValueError(f"rule '{node.name}' is missing")
            node.target = self._rules[node.name]
        for child in node.children():
            self._resolve(child)

    def _beginning(self, node: ASTNode) -> tuple[frozenset[str], bool]:
        """What ``node`` begins with, and whether it matches nothing too."""
        if isinstance(node, RuleRefNode):
            return self._begins[node.name]
        if isinstance(node, LiteralNode):
            first = _CHARACTERS.match(node.value)
            return frozenset() if first is None else frozenset({f'"{first[0]}"'}), first is None
        if isinstance(node, RegexNode):
            return frozenset({str(node)}), False
        found, empty = frozenset[str](), isinstance(node, SequenceNode)
        for child in node.children():
            more, child_empty = self._beginning(child)
            found |= more
            if isinstance(node, SequenceNode) and not child_empty:
                return found, False
            empty |= child_empty
        return found, empty or (isinstance(node, RepetitionNode) and node.min_times == 0)

    def _after(self, rest: list[ASTNode], follow: frozenset[str]) -> frozenset[str]:
        found, empty = self._beginning(SequenceNode(rest))
        return found | follow if empty else found

    def _within(self, node: ASTNode, follow: frozenset[str]) -> frozenset[str]:
        """What follows a child of ``node``, which is no sequence."""
        repeats = isinstance(node, RepetitionNode) and node.max_times != 1
        return follow | self._beginning(node)[0] if repeats else follow

    def _note_follows(self, node: ASTNode, follow: frozenset[str]) -> None:
        if isinstance(node, RuleRefNode):
            if node.name in self._follows:
                self._follows[node.name] |= follow
        elif isinstance(node, SequenceNode):
            for i, child in enumerate(node.nodes, 1):
                self._note_follows(child, self._after(node.nodes[i:], follow))
        else:
            for child in node.children():
                self._note_follows(child, self._within(node, follow))

    def _parsed(self, node: ASTNode, follow: frozenset[str]) -> str:
        """A part of a recursive rule."""
        if isinstance(node, SequenceNode):
            each = enumerate(node.nodes, 1)
            return " ".join(self._parsed(child, self._after(node.nodes[i:], follow)) for i, child in each) or '""'
        # Other inline parts stay divided: the larger a lexeme, the more often it hides a shorter one beside it.
        simple = isinstance(node, RepetitionNode) and isinstance(node.node, RegexNode)
        if simple or (node.is_terminal() and not node.children()):
            return self._lexed(node, follow)
        if isinstance(node, RuleRefNode):
            return str(node)
        return _rebuilt(node, [self._parsed(child, self._within(node, follow)) for child in node.children()])

    def _lexed(self, node: ASTNode, follow: frozenset[str]) -> str:
        """A part without recursion, as one lexeme unless that could take what follows, else as several.

        A repetition of most of all characters is one in any case: with a lexeme per character, masks are too expensive.
        """
        if isinstance(node, LiteralNode | RegexNode):
            return str(node)
        begins = self._beginning(node)[0] if isinstance(node, RepetitionNode) else ()
        if any(text.startswith(("/[^", f"/{_ANY}")) for text in begins) or self._is_safe(str(node), follow):
            return self._lexemes.setdefault(str(node), f"L{len(self._lexemes)}")
        if isinstance(node, RuleRefNode):
            assert node.target is not None
            return self._lexed(node.target.alternatives, follow)
        if isinstance(node, SequenceNode):
            if len(node.nodes) == 1:
                return self._lexed(node.nodes[0], follow)
            for cut in range(len(node.nodes) - 1, 0, -1):
                head, tail = SequenceNode(node.nodes[:cut]), SequenceNode(node.nodes[cut:])
                between = self._after(tail.nodes, follow)
                if cut == 1 or self._is_safe(str(head), between):
                    return f"{self._lexed(head, between)} {self._lexed(tail, follow)}"
        return _rebuilt(node, [self._lexed(child, self._within(node, follow)) for child in node.children()])

    def _is_safe(self, lexeme: str, follow: frozenset[str]) -> bool:
        """Whether ``lexeme`` leaves what follows it alone: its longest match never takes one of ``follow`` that comes
        after a shorter match."""
        if not follow:
            return True
        if (lexeme, follow) not in self._known:
            taken = f"((({lexeme}) ({' | '.join(sorted(follow))}) {_REST}) & ({lexeme}))"
            source = LLMatcher.grammar_from_lark(f"start: X\n{self._terminals}X: {taken}\n")
            matcher = LLMatcher(_byte_vocabulary(), source, log_level=0, limits=LLParserLimits(step_lexer_fuel=_FUEL))
            if not matcher.is_error():
                matcher.compute_bitmask()
            self._known[lexeme, follow] = matcher.is_error()  # nothing is taken, or the comparison is too expensive
        return self._known[lexeme, follow]


def _rebuilt(node: ASTNode, inner: list[str]) -> str:
    if isinstance(node, RepetitionNode):
        return str(RepetitionNode(RuleRefNode(f"({inner[0]})"), node.min_times, node.max_times))
    return f"({' | '.join(inner)})"
