"""Grammars: which tokens may follow, at every node of a tree, so that the output matches what the request says."""

from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.state import GrammarState

__all__ = ["GrammarCompiler", "GrammarState"]
