"""Ahead-of-time compilation of every kernel for every chip, without a GPU: ``python -m verify_kernels.gpu.aot``."""
