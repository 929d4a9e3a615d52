"""Native replay of compiled graphs on the CPU, without the Python around their kernels.

The code that inductor writes around its kernels allocates, checks and calls line by line in Python,
a microsecond or more each: a sixth of a small decode step of thirty layers. But which functions are
called, in which order and with which arguments, depends only on the sizes of the inputs. So a
recorder writes the calls down during the first run at these sizes, and later runs replay them in
one call of C. Unlike in a CUDA graph no address is fixed: the addresses of inputs are read at each
run, and intermediate results have offsets in an arena.

A graph that does anything but call its own kernels and ops that record their calls (a library's
matrix product, a number read from a tensor) is not replayed; inductor's code runs as before.
"""
