"""`python -m graphs`: warm up, explain, and manage the cache."""

from __future__ import annotations

from graphs.cli import main

if __name__ == "__main__":
    main()
