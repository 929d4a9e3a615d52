"""The request of a program, found among the first rows of all: grids do not know lengths."""

import triton
import triton.language as tl


@triton.jit
def request_of(program, starts, requests, QUERIES: tl.constexpr):
    """The request whose tiles hold a program.

    Request r has the programs from ``starts[r] // QUERIES + r`` on, enough for any number of rows;
    so ``T // QUERIES + R`` programs serve any mix of R requests with T rows. Source: the unified
    Triton kernel of vLLM.
    """
    low = 0
    high = requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts + middle) // QUERIES + middle <= program:
            low = middle + 1
        else:
            high = middle
    return tl.maximum(low - 1, 0)
