"""A server under mixed load for hours: does it release everything that it allocates?"""
