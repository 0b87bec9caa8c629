"""Native CPU kernels: C++ sources in `csrc`, how they are built, and their ctypes bindings."""
