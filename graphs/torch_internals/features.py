"""Features: optional uses of torch's internals, none of which can fail a capture.

Each has a probe, which says whether it works with this torch, and a fallback that always works. A
feature that raises is switched off for the rest of the process, and logged once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from traceback import walk_tb
from typing import Any, NamedTuple, Self, TypeVar

__all__ = ["Feature", "FeatureState", "Patch", "SharedPatch", "all_features", "with_features"]

T = TypeVar("T")

_log = logging.getLogger(__name__)
_changing = threading.RLock()
_features: dict[str, Feature] = {}
_SUSPENDED: ContextVar[frozenset[str]] = ContextVar("suspended features", default=frozenset())


class FeatureState(NamedTuple):
    """The state of a feature in this process.

    Attributes:
        name: in logs and reports.
        is_on: whether captures use it.
        why_off: why they do not; empty if they do.
        gain: what it gains.
        benchmark: the script that prints the gain.
        fallback: what happens without it.
        versions: of torch that it was tested with.
    """

    name: str
    is_on: bool
    why_off: str
    gain: str
    benchmark: str
    fallback: str
    versions: str


class Feature:
    """An optional use of torch's internals.

    Args:
        name, gain, fallback, versions, benchmark: see `FeatureState`.
        files: suffixes of file names; an error with one of them in its traceback is this feature's.
        probe: returns why it does not work with this torch, or an empty string; may raise.
        suspend: called when captures stop using it, if checking `is_on` is not enough.
        resume: called when they use it again.
    """

    def __init__(
        self,
        name: str,
        *,
        gain: str,
        fallback: str,
        versions: str,
        files: tuple[str, ...],
        probe: Callable[[], str],
        benchmark: str = "benchmarks/torch_features.py",
        suspend: Callable[[], None] = lambda: None,
        resume: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.gain, self.fallback, self.versions = gain, fallback, versions
        self.files, self.benchmark = files, benchmark
        self.suspend, self.resume = suspend, resume
        self._probe = probe
        self._why_off: str | None = None
        self._suspensions = 0  # of all threads
        _features[name] = self

    @property
    def is_on(self) -> bool:
        """Whether captures use it; the first call probes torch."""
        return self.name not in _SUSPENDED.get() and not self.why_off

    @property
    def why_off(self) -> str:
        """Why captures do not use it, or an empty string; the first call probes torch."""
        if self._why_off is None:
            with _changing:
                if self._why_off is None:
                    self._why_off = self._probed()
        return self._why_off

    def switch_off(self, reason: str) -> None:
        """Stop using it in this process; logs the reason once."""
        with _changing:
            if self.why_off:
                return
            self._why_off = reason
            self.suspend()
        _log.warning("torch feature %s is switched off: %s. %s", self.name, reason, self.fallback)

    @property
    def state(self) -> FeatureState:
        """Its state in this process."""
        why_off = self.why_off
        return FeatureState(
            self.name, not why_off, why_off, self.gain, self.benchmark, self.fallback, self.versions
        )

    def is_in(self, error: BaseException) -> bool:
        """Whether the traceback of an error, or of a cause of it, leads through the feature."""
        return bool(self.files) and any(each.endswith(self.files) for each in _file_names(error))

    def _resume(self) -> None:
        if not (self._suspensions or self.why_off):
            self.resume()

    @contextmanager
    def _suspended(self) -> Iterator[None]:
        with _changing:
            self._suspensions += 1
        try:
            self.suspend()
            yield
        finally:
            with _changing:
                self._suspensions -= 1
                self._resume()

    def _probed(self) -> str:
        try:
            return self._probe()
        except Exception as error:
            return f"its probe fails: {describe(error)}"


def all_features() -> list[Feature]:
    """Every feature, by name."""
    return [_features[name] for name in sorted(_features)]


def with_features(make: Callable[[], T], *, keep_all: bool = False) -> T:
    """Make a capture; if it fails, repeat it without the features that may be the cause.

    A feature is switched off only if the capture fails twice with it and works without it.

    Args:
        make: captures.
        keep_all: repeat only without features whose code is in the traceback, not without all.

    Raises:
        Exception: `make` fails without them too.
    """
    try:
        return make()
    except Exception as error:
        used = [feature for feature in all_features() if feature.is_on]
        found = [feature for feature in used if feature.is_in(error)]
        blamed = [each for each in ((found,) if keep_all else (found, used)) if each]
        for without in ([], *blamed) if blamed else ():
            with suppress(Exception), _suspended(without):
                result = make()
                for feature in without:
                    feature.switch_off(f"a capture failed with it: {describe(error)}")
                return result
        raise


@contextmanager
def _suspended(features: Iterable[Feature]) -> Iterator[None]:
    token = _SUSPENDED.set(_SUSPENDED.get() | {feature.name for feature in features})
    try:
        with ExitStack() as stack:
            for feature in features:
                stack.enter_context(feature._suspended())
            yield
    finally:
        _SUSPENDED.reset(token)


def describe(error: BaseException) -> str:
    """Return class and first line of an error."""
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line}".rstrip(": ")


def _file_names(error: BaseException) -> Iterator[str]:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield from (frame.f_code.co_filename for frame, _ in walk_tb(each.__traceback__))
        yield from (frame.filename for frame in getattr(each, "real_stack", None) or ())
        waiting += [each.__cause__, each.__context__, getattr(each, "inner_exception", None)]


class Patch(NamedTuple):
    """An attribute `name` of a module or class `owner`, and its replacement `value`."""

    owner: Any
    name: str
    value: Any


class SharedPatch:
    """Replaces attributes while any thread is inside.

    The first thread to enter replaces them, the last one to leave restores them. Replacements must
    not affect threads outside.

    Args:
        make: returns the replacements; called by the first thread.
    """

    def __init__(self, make: Callable[[], Sequence[Patch]]) -> None:
        self._make = make
        self._lock = threading.RLock()
        self._inside = 0
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Self:
        with self._lock:
            if not self._inside:
                try:
                    for patch in self._make():
                        undo = _restore(patch)
                        setattr(*patch)
                        self._undo.append(undo)
                except BaseException:
                    self._restore()
                    raise
            self._inside += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._restore()

    def _restore(self) -> None:
        while self._undo:
            self._undo.pop()()


def _restore(patch: Patch) -> Callable[[], None]:
    owner, name, _ = patch
    own = getattr(owner, "__dict__", {})
    if name in own:  # the stored object, such as a staticmethod, not what getattr returns
        before = own[name]
        return lambda: setattr(owner, name, before)
    return lambda: delattr(owner, name)
