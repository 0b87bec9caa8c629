"""The CPU kernels in plain torch and numpy: they run where C++ cannot be built, and check the native ones."""
