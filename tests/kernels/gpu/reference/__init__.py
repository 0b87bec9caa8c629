"""A plain torch twin of every Triton kernel, same signature: the oracle of its tests, on any device."""
