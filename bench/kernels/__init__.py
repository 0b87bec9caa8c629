"""Benchmarks of the GPU kernels and of whole steps, compared with the bytes that must move."""
