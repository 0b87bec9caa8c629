"""Models: where they come from, how they become packed weights, and how they run."""
