"""Experiments that a client runs: both arms get the same requests, and every answer is recorded."""
