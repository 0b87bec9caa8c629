"""Statistics for latencies: quantiles, dependent records, looking before the end. Each formula names its source."""
