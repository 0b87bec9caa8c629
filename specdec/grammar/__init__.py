"""Grammars as token masks at every node of a tree, and token healing."""
