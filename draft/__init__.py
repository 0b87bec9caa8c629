"""Drafters: each proposes token trees behind one protocol; the engine never asks how tokens were made."""
