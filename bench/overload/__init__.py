"""A server that is asked for more than it can do: does it still do what it can?"""
