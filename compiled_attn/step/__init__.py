"""A scheduler's step as padded tensors.

`BatchBuilder` turns the requests of a step into a `StepBatch`: flat, fixed-shape tensors of one
bucket. Host work (numpy) ends here; `StepBatch.metadata` expands them with tensor operations alone,
so it belongs inside the captured graph, where biases are made once a step for all layers.

Which part a token reads a key from, so that none is counted twice:

- a request with one new token reads the cache up to and including that token, which is written
  first; it has no causal part;
- a request with several new tokens (prompt chunk, speculative drafts) reads the cache up to its
  context and sees its new tokens in the causal part;
- a cached block that one query token uses is unique; one that more tokens use is shared.
"""

from compiled_attn.step.builder import BatchBuilder
from compiled_attn.step.divided import BlockShare, DividedTableLayout
from compiled_attn.step.layout import ModelWork, StepLayout, StepLimits
from compiled_attn.step.metadata import AttentionMetadata
from compiled_attn.step.parts import StepBatch, StepPlan
from compiled_attn.step.parts_layout import PartsLayout
from compiled_attn.step.requests import Request, RequestTable
from compiled_attn.step.tables import StateTableBatch, TableBatch, TableLayout, TablePlan

__all__ = [
    "AttentionMetadata",
    "BatchBuilder",
    "BlockShare",
    "DividedTableLayout",
    "ModelWork",
    "PartsLayout",
    "Request",
    "RequestTable",
    "StateTableBatch",
    "StepBatch",
    "StepLayout",
    "StepLimits",
    "StepPlan",
    "TableBatch",
    "TableLayout",
    "TablePlan",
]
