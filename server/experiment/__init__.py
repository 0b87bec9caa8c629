"""Latency experiments: plan, assignment to arms, records, analysis, report."""
