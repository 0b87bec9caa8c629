"""Experiments that a client runs: both arms are asked the same, and every answer is recorded."""
