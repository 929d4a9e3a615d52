"""Parts of this library inside of other people's engines: one module per engine.

What belongs to an engine's interface is here and nowhere else. No module here is imported by
another part of the library, and none imports its engine before it is asked for. See
docs/guide/other_engines.md.
"""

from __future__ import annotations

__all__: list[str] = []
"""The modules are imported by their own names: each has another engine's packages behind it."""
