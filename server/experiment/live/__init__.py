"""Experiments on a running server's traffic. Requests never wait for them."""
