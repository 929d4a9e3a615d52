"""Parts that the core does not need: plugins of other engines, replicas, context parallelism.

Nothing in the core imports a module of this folder, except the commands. No module imports its
engine before a call needs it. See docs/guide/other_engines.md.
"""
