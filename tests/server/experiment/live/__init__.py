"""Tests of `server.experiment.live`."""
