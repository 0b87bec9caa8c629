"""Latency experiments: what each request took, in which arm, and what may be concluded from it."""
