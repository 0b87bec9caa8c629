"""What the device runs: tree attention over a paged cache, batch-invariant linear layers, sampling.

Every kernel has a torch twin of the same signature, so that specdec imports and runs without a compiler or GPU.
"""
