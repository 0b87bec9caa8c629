"""Somebody types a file key by key: how long after a key there is a suggestion to look at."""
