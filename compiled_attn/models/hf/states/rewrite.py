"""Rewrites the forward of a mixer so that its convolution and its scan use the step's states.

The mixers of transformers (Mamba, gated delta nets, short convolutions) call module-level functions
for everything that mixes tokens. A rewritten forward passes each of these calls on to
`states.calls`, with the function, the cache argument of the forward and the number of the call; all
other code is the model's own.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import re
import textwrap
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

from compiled_attn.models.hf.states import calls

__all__ = [
    "CARRIERS",
    "RewriteError",
    "Rewritten",
    "carrier_name",
    "is_rewritten",
    "rewrite",
    "uses",
]

CARRIERS = ("cache", "past_key_values", "cache_params")
"""How transformers calls the cache argument: since 5.24 the first, before one of the others."""

_KINDS = {
    "causal_conv1d_fn": calls.conv,
    "torch_chunk_gated_delta_rule": calls.delta,
    "chunk_kimi_delta_attention": calls.delta,
    "mamba2_chunk_scan": calls.ssd,
    "mamba_selective_scan": calls.scan,
}
_UNREACHED = {
    # Without a state from an earlier call, and in eval mode, no forward gets to these.
    "causal_conv1d_update",
    "mamba2_selective_state_update",
    "mamba2_split_conv1d_scan_combined",
    "mamba_inner_fn",
    "mamba_selective_state_update",
    "recurrent_kimi_delta_attention",
    "torch_recurrent_gated_delta_rule",
}
_MIXES = re.compile(r"conv1d|scan|delta|recurrent|state_update|mamba|lightning|linear_attention")
_LOOPS = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_PREFIX, _FILE = "_compiled_attn_", "<compiled_attn "


class RewriteError(ValueError):
    """A forward that cannot be rewritten; the text ends the sentence "a module that ..."."""


class Rewritten(NamedTuple):
    """A rewritten forward.

    Args:
        forward: called as the one of the class.
        kinds: name of the function of each call, in order.
        read: names of the modules whose ``weight`` it reads, instead of calling them.
    """

    forward: Callable[..., Any]
    kinds: tuple[str, ...]
    read: tuple[str, ...]


def carrier_name(function: Callable[..., Any]) -> str | None:
    """Returns the name of the cache argument of a forward; None: it has none."""
    known = inspect.signature(function).parameters
    return next((name for name in CARRIERS if name in known), None)


def uses(function: Callable[..., Any]) -> set[str]:
    """Returns the functions that `rewrite` knows and that a forward calls."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return set() if code is None else {*_KINDS} & {*code.co_names}


def is_rewritten(function: Any) -> bool:
    """Whether a forward was made here."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(_FILE)


@functools.cache  # equal modules share code, and with it the trace of their layer
def rewrite(function: Callable[..., Any], first: int) -> Rewritten:
    """Returns a forward whose calls are numbered from ``first`` on.

    Raises:
        RewriteError: there is no source, or it mixes tokens in a way that is not known.
    """
    plain = inspect.unwrap(function)
    if not isinstance(plain, FunctionType) or plain.__code__.co_freevars:
        raise RewriteError("has a forward that is not a plain function")
    try:
        source = textwrap.dedent(inspect.getsource(plain))
    except (OSError, TypeError):
        raise RewriteError("has no source of its forward") from None
    carrier = carrier_name(plain)
    if carrier is None:
        raise RewriteError(f"has no argument {' or '.join(CARRIERS)}")
    tree = ast.parse(source)
    (definition,) = tree.body
    if not isinstance(definition, ast.FunctionDef):
        raise RewriteError("has a forward that is not a plain function")
    _check(definition)
    numbering = _Numbering(carrier, first)
    numbering.visit(definition)
    _strip(definition)
    # Without a name, as the globals are a copy: Dynamo would look up those of the module.
    names = {**plain.__globals__, **{_PREFIX + name: call for name, call in _KINDS.items()}}
    names.pop("__name__", None)
    made: dict[str, Any] = {}
    exec(_compiled(tree, plain, first), names, made)
    forward = made[definition.name]
    forward.__defaults__, forward.__kwdefaults__ = plain.__defaults__, plain.__kwdefaults__
    return Rewritten(forward, tuple(numbering.found), _weights_read(definition))


class _Numbering(ast.NodeTransformer):
    """``f(x)`` -> ``_compiled_attn_f(f, cache, 0, x)``, with the number of the call."""

    def __init__(self, carrier: str, first: int) -> None:
        self._carrier, self._first = carrier, first
        self.found: list[str] = []

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in _KINDS:
            number = ast.Constant(self._first + len(self.found))
            self.found.append(node.func.id)
            own = ast.Name(_PREFIX + node.func.id, ast.Load())
            node.args[:0] = [node.func, ast.Name(self._carrier, ast.Load()), number]
            node.func = own
        return node


def _check(definition: ast.FunctionDef) -> None:
    """Raises RewriteError unless each kind of state is called at one place, which is no loop."""
    called = [*_called(definition)]
    unknown = [
        name for name in called if _MIXES.search(name) and name not in {*_KINDS, *_UNREACHED}
    ]
    if unknown:
        raise RewriteError(f"calls {unknown[0]}, which is not known here")
    known = [name for name in called if name in _KINDS]
    scans = [name for name in known if _KINDS[name] is not calls.conv]
    if len(scans) > 1 or len(known) - len(scans) > 1:
        raise RewriteError(f"calls {', '.join(known)} in one forward")
    for loop in ast.walk(definition):
        if isinstance(loop, _LOOPS) and (inner := {*_called(loop)} & {*_KINDS}):
            raise RewriteError(f"calls {inner.pop()} in a loop")


def _called(node: ast.AST) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Name):
            yield each.func.id


def _weights_read(definition: ast.FunctionDef) -> tuple[str, ...]:
    """Names ``name`` of all ``self.name.weight``."""
    read = [each for each in ast.walk(definition) if isinstance(each, ast.Attribute)]
    owners = [each.value for each in read if each.attr == "weight"]
    return tuple({each.attr: None for each in owners if isinstance(each, ast.Attribute)})


def _strip(definition: ast.FunctionDef) -> None:
    """Removes what would be evaluated with the definition: defaults are set afterwards."""
    arguments = definition.args
    definition.decorator_list, definition.returns = [], None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [each and ast.Constant(None) for each in arguments.kw_defaults]
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    for each in (*every, arguments.vararg, arguments.kwarg):
        if each is not None:
            each.annotation = None


def _compiled(tree: ast.Module, plain: FunctionType, first: int) -> Any:
    """Compiles the text of the tree, which tracebacks and Dynamo then find under a stable name."""
    text = ast.unparse(ast.fix_missing_locations(tree)) + "\n"
    name = f"{_FILE}{plain.__module__}.{plain.__qualname__} from {first}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    return compile(text, name, "exec", dont_inherit=True)
