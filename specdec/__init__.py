"""specdec: a speculative-decoding-first, low-latency LLM serving engine."""

__version__ = "0.2.0"
