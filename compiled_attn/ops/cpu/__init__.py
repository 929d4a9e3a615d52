"""The op on CPUs: C++ sources, their build and the libraries built."""
