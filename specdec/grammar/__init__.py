"""Grammars as token masks at every node of a tree, token healing, and thinking budgets."""
