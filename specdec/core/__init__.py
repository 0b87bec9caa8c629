"""Requests and events, sequences, trees, sampling, the KV cache's block tables, and text stops."""
