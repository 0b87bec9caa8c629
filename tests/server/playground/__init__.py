"""Tests of the page at /."""
