"""Developer tools, which are not installed."""
