"""Reads entries of a store in tests."""

from graphs.store import key_of

FACTORS = {"torch": "2.13", "bucket": {"rows": 4}, "cpu": "AVX2"}


def content(store, factors=FACTORS):
    with store.use(factors) as folder:
        if folder is None:
            return None
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def entry_of(store, factors=FACTORS):
    return store.path / "artifacts" / key_of(factors)
