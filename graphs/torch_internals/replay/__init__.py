"""Tapes: the native calls of a compiled graph, made again without the Python around them.

What inductor writes around its kernels allocates, checks and calls line by line in Python, a
microsecond or more each: with thirty layers that was a sixth of a small step on a CPU. But which
functions are called, in which order and with what, hangs on the sizes of the inputs alone. So the
calls are written down while the graph runs at its sizes for the first time, and are later made one
after the other, in one call of C. CUDA graphs do the same for a device; here no address is fixed:
where inputs lie is asked at each run, and what a graph makes on its way has a place in an arena.

A graph that does anything else than call its own kernels and ops that note their calls (a matrix
product of a library, a number that is read from a tensor) has no tape, and runs as it did.
"""
