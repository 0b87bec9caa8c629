"""Statistics of latencies: quantiles, bootstrap, always-valid bounds, multiple tests."""
