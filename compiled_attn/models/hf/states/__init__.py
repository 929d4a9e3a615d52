"""Models whose layers keep a state of fixed size, such as Mamba and gated delta nets.

Their mixers run as they are, except for the functions that mix tokens: `rewrite` passes these calls
to `calls`, which computes them over the states of a `StateCache`; `found` tells which modules have
them; `carrier` has the objects that stand in the place of a transformers cache.
"""
