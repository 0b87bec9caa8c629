"""What the device runs: tree attention over a paged cache, batch-invariant linear layers, sampling.

Every kernel has a plain twin: the CPU's in `reference`, which runs where there is no compiler, a GPU's in the tests.
"""
