"""The page at /, which shows where tokens come from: its sources are in `web`, what they build in `static`."""
