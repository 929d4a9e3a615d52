"""`python -m graphs`: warm up, explain and look after the cache from the shell."""

from __future__ import annotations

from graphs.cli import main

if __name__ == "__main__":
    main()
