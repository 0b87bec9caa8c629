"""A model on a GPU: weights, KV pool and forward by the Triton kernels; one upload and one graph per step."""
