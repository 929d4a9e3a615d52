"""The folder of a user's caches; the one place outside of the commands to read the environment.

Used only by what was given no folder of its own: the commands, and the native kernel.
"""

from __future__ import annotations

import os
from pathlib import Path

from graphs.errors import StoreError

__all__ = ["cache_folder"]


def cache_folder(name: str) -> Path:
    """The folder `name` among a user's caches; it may not exist yet.

    In `XDG_CACHE_HOME` if that is an absolute path, as the XDG specification wants it; else where
    the platform keeps caches, if `platformdirs` is installed (extra `cli`), which on Linux is
    `~/.cache`; else in `~/.cache`.

    Raises:
        StoreError: the user's home cannot be found.
    """
    told = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(told):
        return Path(told, name)
    try:
        home = Path.home()
    except RuntimeError as error:
        raise StoreError(f"{error} Give a folder, or set XDG_CACHE_HOME to one") from error
    try:
        from platformdirs import user_cache_path
    except ImportError:
        return home / ".cache" / name
    # It takes some variables as they are, but a relative path cannot be a user's cache.
    found = user_cache_path(name, appauthor=False)
    return found if found.is_absolute() else home / ".cache" / name
