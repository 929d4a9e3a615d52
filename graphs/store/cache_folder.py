"""The default folder of caches. Besides the commands, only this module reads the environment."""

from __future__ import annotations

import os
from pathlib import Path

from graphs.errors import StoreError

__all__ = ["cache_folder"]


def cache_folder(name: str) -> Path:
    """The folder `name` among the user's caches; it may not exist yet.

    It is in `XDG_CACHE_HOME` if that is an absolute path, as the XDG specification requires, else
    in the platform's cache folder if `platformdirs` is installed (extra `cli`), else in `~/.cache`.

    Raises:
        StoreError: the home of the user is unknown.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base, name)
    try:
        home = Path.home()
    except RuntimeError as error:
        raise StoreError(f"{error} Give a folder, or set XDG_CACHE_HOME to one") from error
    try:
        from platformdirs import user_cache_path
    except ImportError:
        return home / ".cache" / name
    # platformdirs returns some variables unchecked, but a relative path is no cache of a user.
    found = user_cache_path(name, appauthor=False)
    return found if found.is_absolute() else home / ".cache" / name
