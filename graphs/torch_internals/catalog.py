"""All features, each from its own module."""

from __future__ import annotations

import sys

from graphs.torch_internals.checks import NATIVE_CHECKS
from graphs.torch_internals.direct_call import DIRECT_CALL
from graphs.torch_internals.features import FeatureState
from graphs.torch_internals.headers import HEADERS_AHEAD
from graphs.torch_internals.regions import REGION_REUSE, REGIONS
from graphs.torch_internals.replay.replay import REPLAY
from graphs.torch_internals.vectors import TRUSTED_VECTORS

__all__ = ["FEATURES", "features_line", "features_of_process", "torch_features"]

FEATURES = (
    DIRECT_CALL,
    HEADERS_AHEAD,
    NATIVE_CHECKS,
    REGIONS,
    REGION_REUSE,
    REPLAY,
    TRUSTED_VECTORS,
)


def torch_features() -> tuple[FeatureState, ...]:
    """Return the state of each optional use of torch's internals."""
    return tuple(feature.state for feature in FEATURES)


def features_of_process() -> tuple[FeatureState, ...]:
    """As `torch_features`; none where nothing has loaded Dynamo, which takes seconds."""
    return torch_features() if "torch._dynamo" in sys.modules else ()


def features_line() -> str:
    """List the features that are on, and why others are off, in a line."""
    states = torch_features()
    off = [f"{each.name} ({each.why_off})" for each in states if each.why_off]
    on = ", ".join(each.name for each in states if each.is_on) or "none"
    return f"{on}; off: {', '.join(off)}" if off else on
