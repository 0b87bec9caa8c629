"""Measure the front end's cost with an engine that only keeps a schedule and clients that record times."""
