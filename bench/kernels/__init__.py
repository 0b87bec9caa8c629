"""Times of the GPU kernels and of a step made of them, against the bytes that have to move."""
