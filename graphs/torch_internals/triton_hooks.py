"""Reports the kernels that Triton compiles, by the hooks in its knobs; never imports Triton."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any, NamedTuple

__all__ = ["Kernel", "TritonHooks"]

# Compiles whose hook may still follow; more only come from asynchronous compiles.
_MOST_REPORTED = 256


class Kernel(NamedTuple):
    """A kernel that Triton compiled: its name, where it is defined, and the types it is for."""

    name: str
    file: str
    line: int
    types: str


class TritonHooks:
    """Hooks of Triton, called after each compile of a kernel; adding them again has no effect.

    Triton 3.6 to 3.9 (torch 2.11 to 2.15) calls `knobs.compilation.listener` after each compile and
    says whether the kernel came from its cache on disk, then, for a kernel that is called directly,
    `knobs.runtime.jit_post_compile_hook`, which cannot say that. Kernels that came from the cache
    are not reported, unless the listener is missing. Hooks that were set before are called first.

    Args:
        compiled: takes the kernel; what it raises reaches the caller of the kernel, before it runs.
    """

    def __init__(self, compiled: Callable[[Kernel], None]) -> None:
        self._compiled = compiled
        self._patches: list[_Patch] = []
        # Signatures (by identity, since Triton passes the same object) that the listener has seen.
        self._reported: deque[object] = deque(maxlen=_MOST_REPORTED)

    def add(self) -> None:
        """Add the hooks if Triton is imported; call it again after an import."""
        knobs = _knobs()
        if self._patches or knobs is None:
            return
        for owner, name, after in (
            (getattr(knobs, "compilation", None), "listener", self._listen),
            (knobs.runtime, "jit_post_compile_hook", self._judge),
        ):
            if hasattr(owner, name):
                self._patches.append(_Patch(owner, name, after))

    def remove(self) -> bool:
        """Restore the hooks that were set before; returns whether ours were replaced meanwhile."""
        were_replaced = bool(self._patches) and not any(p.is_current for p in self._patches)
        for patch in self._patches:
            patch.restore()
        self._patches.clear()
        self._reported.clear()
        return were_replaced

    def will_report(self) -> bool:
        """Whether Triton is compiling a kernel in this thread that will be reported."""
        frame, depth = sys._getframe(1), 0
        while frame is not None and depth < 100:
            where = frame.f_globals.get("__name__"), frame.f_code.co_name
            if where == ("triton.compiler.compiler", "compile"):
                return any(patch.is_current for patch in self._patches)
            frame, depth = frame.f_back, depth + 1  # type: ignore[assignment]
        return False

    def _listen(self, **given: Any) -> None:
        source, is_cached = given.get("src"), given.get("cache_hit")
        signature = getattr(source, "signature", None)
        if is_cached is None:
            return
        self._reported.append(signature)
        if not is_cached:
            self._compiled(_kernel(getattr(source, "fn", source), signature))

    def _judge(self, **given: Any) -> None:
        compiled = given.get("compile")  # a CompiledKernel where inductor calls the hook
        signature = compiled.get("signature") if isinstance(compiled, Mapping) else None
        was_reported = any(signature is each for each in self._reported)
        if not (given.get("already_compiled") or (was_reported and signature is not None)):
            self._compiled(_kernel(given.get("fn"), signature))


class _Patch:
    """An attribute that is replaced by a hook, which calls the one that was there before."""

    def __init__(self, owner: Any, name: str, after: Callable[..., None]) -> None:
        self._owner, self._name = owner, name
        self._was_set = name in vars(owner)
        self._before = before = getattr(owner, name)

        def hook(*args: Any, **given: Any) -> Any:
            result = before(*args, **given) if before is not None else None
            if self._is_on:
                after(**given)
            return result

        # Inductor looks at the parameters of the hook before it calls it.
        self._hook = hook if before is None else functools.update_wrapper(hook, before)
        self._is_on = True
        setattr(owner, name, self._hook)

    @property
    def is_current(self) -> bool:
        return getattr(self._owner, self._name, None) is self._hook

    def restore(self) -> None:
        self._is_on = False  # another hook may have taken ours into its chain
        if not self.is_current:
            return
        if self._was_set:
            setattr(self._owner, self._name, self._before)
        else:
            delattr(self._owner, self._name)


def _knobs() -> Any:
    knobs = sys.modules.get("triton.knobs") or getattr(sys.modules.get("triton"), "knobs", None)
    # While it is being imported, it has no `runtime` yet.
    return knobs if getattr(knobs, "runtime", None) is not None else None


def _kernel(function: Any, signature: object) -> Kernel:
    jit = getattr(function, "jit_function", function)
    python = getattr(jit, "fn", None)
    code = getattr(python, "__code__", None)
    name = getattr(python, "__qualname__", "") or getattr(function, "name", "")
    file, line = (code.co_filename, code.co_firstlineno) if isinstance(code, CodeType) else ("", 0)
    pairs = signature.items() if isinstance(signature, Mapping) else ()
    types = ", ".join(f"{key}: {kind}" for key, kind in pairs)
    return Kernel(str(name or "a kernel").rpartition("<locals>.")[2], file, line, types)
