"""The CPU kernels in plain torch and numpy: they run where C++ can not be built, and check the native ones."""
