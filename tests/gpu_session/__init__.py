"""Everything that needs a GPU in one run that can be cut off and continued: `python -m tests.gpu_session`."""
