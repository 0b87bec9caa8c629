"""Experiments in a running server: requests get arms, what they took is written down, and nobody waits for it."""
