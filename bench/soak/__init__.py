"""A server under mixed load for as long as one likes: does it give back all that it takes?"""
