"""Grammars: which tokens may follow, at every node of a tree, so that the output matches what the request says."""

from specdec.grammar.grammar_compiler import GrammarCompiler
from specdec.grammar.grammar_state import GrammarState

__all__ = ["GrammarCompiler", "GrammarState"]
