"""Triton kernels for GPUs. Importing this package needs triton, never a GPU."""
