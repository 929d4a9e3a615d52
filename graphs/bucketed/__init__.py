"""One call from a module to captured buckets: finds axes, pads, cuts, checks."""
