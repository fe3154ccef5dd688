"""User functions as device functions: predicates and score modifications, written once, run in PyTorch and in a kernel.

A function is read from its source and rewritten where Triton's language differs from PyTorch's: ``//`` and ``%`` round
down, captured numbers become literals, ``table[i, j]`` on an extra tensor becomes a load, and a few functions
(`FUNCTIONS`) are Triton's. A mask expression becomes one function of the same kind, so that a kernel knows one
predicate, whatever it is made of.

Restrictions: the source must be readable (a file, a notebook or a doctest, not ``exec``), positional parameters only,
and nothing captured but numbers and functions of this kind.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import linecache
import math
from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, NoReturn

import torch
import triton
import triton.language as tl

from .. import errors, masks
from ..block_masks import BlockMask
from ..interning import intern, lookup
from ..mask_algebra import And, Mask, Or
from ..problem import Options
from ..score_mods import ScoreMod
from . import score

# Positions stay below this, so a bound this large is none.
UNBOUNDED = 2**30
# In place of the rank of an extra argument: it is an integer, and sealed.
INTEGER = -1


@triton.jit
def floor_mod(a, b):
    """``a % b`` with the sign of b, as in Python and PyTorch."""
    r = a % b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), r + b, r)


@triton.jit
def floor_div(a, b):
    """``a // b`` rounded down, as in Python and PyTorch."""
    d = a // b
    r = a % b
    return tl.where((r != 0) & ((r < 0) != (b < 0)), d - 1, d)


@triton.jit
def at(ptr, sizes, strides, index):
    """``tensor[index]`` for a tuple of indices; one outside reads 0, a negative one counts from the end."""
    offset = tl.cast(0, tl.int64)
    inside = offset == 0
    for d in tl.static_range(len(index)):
        i = index[d] + tl.cast(0, tl.int64)
        i = tl.where(i < 0, i + sizes[d], i)
        inside = inside & (i >= 0) & (i < sizes[d])
        offset = offset + i * strides[d]
    return tl.load(ptr + offset, mask=inside, other=0)


@triton.jit
def grid_at(ptr, strides, b, h, q, k):
    """The element of a tensor that broadcasts to [B, Hq, Sq, Sk]: a dimension of size 1 has stride 0."""
    offset = b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    return tl.load(ptr + offset + q.to(tl.int64) * strides[2] + k.to(tl.int64) * strides[3])


@triton.jit
def id_at(ptr, strides, b, position):
    """The document of a position; ids are [B|1, S]."""
    return tl.load(ptr + b.to(tl.int64) * strides[0] + position.to(tl.int64) * strides[1])


# Functions of PyTorch that may be called beside operators: Triton's of the same names, and one of ours.
FUNCTIONS = {
    *("abs", "where", "exp", "exp2", "log", "log2", "sqrt", "sin", "cos"),
    *("maximum", "minimum", "floor", "ceil", "sigmoid", "tanh"),
}


def _refuse(fn: Callable[..., Any], why: str, fix: str) -> NoReturn:
    name = getattr(fn, "__qualname__", repr(fn))
    errors.fail(
        errors.UnsupportedError, name, why, "functions that Triton can compile (tilewise.kernels.compiled)", fix
    )


def _starts_at(node: ast.AST, line: int) -> bool:
    if isinstance(node, ast.FunctionDef):
        return line in [node.lineno, *(decorator.lineno for decorator in node.decorator_list)]
    return isinstance(node, ast.Lambda) and node.lineno == line


def _definition(fn: FunctionType) -> tuple[list[str], list[ast.stmt]]:
    """Parameter names and body, from the source."""
    try:
        lines, _ = inspect.findsource(fn)
        tree = ast.parse("".join(lines))
    except (OSError, SyntaxError):
        _refuse(fn, "a function without readable source", "define it in a file")
    code = fn.__code__
    kind = ast.Lambda if fn.__name__ == "<lambda>" else ast.FunctionDef
    names = list(code.co_varnames[: code.co_argcount])
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, kind) and _starts_at(node, code.co_firstlineno):
            args = node.args
            if [arg.arg for arg in args.args] == names and _holds(node, fn):
                if args.vararg or args.kwonlyargs or args.kwarg or args.posonlyargs or args.defaults:
                    _refuse(fn, "*, ** or default parameters", "name every parameter")
                found[ast.dump(node)] = node
    if len(found) != 1:
        _refuse(
            fn, f"a function whose source is not found for certain ({len(found)} candidates)", "use def on its own line"
        )
    (node,) = found.values()
    if isinstance(node, ast.Lambda):
        return names, [ast.Return(node.body)]
    return names, [s for s in node.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]


def _holds(node: ast.Lambda | ast.FunctionDef, fn: FunctionType) -> bool:
    """Whether the code of `fn` lies inside this node; Python 3.10 knows no columns and trusts the line."""
    if not isinstance(node, ast.Lambda) or not hasattr(fn.__code__, "co_positions"):
        return True
    first, last = (node.body.lineno, node.body.col_offset), (node.body.end_lineno, node.body.end_col_offset)
    spots = [(line, column) for line, _, column, _ in fn.__code__.co_positions() if line and column]
    return all(first <= spot <= last for spot in spots)


def _of_triton(name: str) -> ast.Attribute:
    """A function of Triton's language, found in its module at each call: that is where the interpreter replaces it."""
    return ast.Attribute(ast.Name("tl", ast.Load()), name, ast.Load())


class _Rewrite(ast.NodeTransformer):
    """One user function in Triton's language; `bound` collects what its text refers to.

    `tables` are the extra arguments that are tensors: their first slot in ``extra``, and their rank.
    """

    def __init__(self, fn: FunctionType, names: list[str], tables: dict[str, tuple[int, int]]) -> None:
        captured = inspect.getclosurevars(fn)
        self.fn, self.tables = fn, tables
        self.bound: dict[str, Any] = {"_floor_mod": floor_mod, "_floor_div": floor_div, "_at": at}
        self.outer = {**captured.builtins, **captured.globals, **captured.nonlocals}
        self.local = {*names, *fn.__code__.co_varnames}

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        helper = {ast.Mod: "_floor_mod", ast.FloorDiv: "_floor_div"}.get(type(node.op))
        if helper is None or (isinstance(node.left, ast.Constant) and isinstance(node.right, ast.Constant)):
            return node
        return ast.Call(ast.Name(helper, ast.Load()), [node.left, node.right], [])

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if not (isinstance(node.value, ast.Name) and node.value.id in self.tables):
            self.generic_visit(node)
            return node
        index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        slot, rank = self.tables[node.value.id]
        if len(index) != rank:
            _refuse(
                self.fn, f"{len(index)} indices into the {rank}-dimensional {node.value.id!r}", "index every dimension"
            )
        place = ast.parse(f"_at({_slots(slot, rank)})", mode="eval").body
        assert isinstance(place, ast.Call)
        place.args.append(ast.Tuple([self.visit(i) for i in index], ast.Load()))
        return place

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        source = self.outer.get(node.value.id) if isinstance(node.value, ast.Name) else None
        if source is math and isinstance(getattr(math, node.attr, None), float):
            return ast.Constant(getattr(math, node.attr))
        if source is not torch:
            self.generic_visit(node)
            return node
        if node.attr not in FUNCTIONS:
            _refuse(
                self.fn, f"a call of torch.{node.attr}", f"use operators and torch.{', torch.'.join(sorted(FUNCTIONS))}"
            )
        return self._bind(score.tanh, "_tanh") if node.attr == "tanh" else _of_triton(node.attr)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        name = node.id
        if name in self.tables and self.tables[name][1]:
            _refuse(
                self.fn, f"the tensor {name!r} used without an index", "index every dimension: table[h], table[q - k]"
            )
        if name in self.local:
            return node
        value = self.outer.get(name)
        if isinstance(value, (bool, int, float)):
            return ast.Constant(value)
        if value is abs:
            return _of_triton("abs")
        if isinstance(value, FunctionType):
            return self._bind(device_function(intern(value)), f"_{name}_{intern(value)}")
        _refuse(
            self.fn,
            f"{name!r} from outside, a {type(value).__name__}",
            "capture numbers only; pass tensors through aux=",
        )

    def _bind(self, value: Any, name: str) -> ast.Name:
        self.bound[name] = value
        return ast.Name(name, ast.Load())


_serial = itertools.count()


def _build(name: str, text: str, bound: dict[str, Any]) -> Any:
    """`text` as a jitted function. Triton reads sources, so the text becomes a file in `linecache`."""
    file = f"<tilewise {name} {next(_serial)}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    namespace = {**bound, "tl": tl, "__name__": __name__}
    exec(compile(text, file, "exec"), namespace)
    return triton.jit(namespace[name])


def _slots(first: int, rank: int, with_sizes: bool = True) -> str:
    """The pointer, sizes and strides of a tensor in ``extra``, as the text of arguments."""
    sizes, strides = (
        "(" + "".join(f"extra[{first + 1 + part * rank + d}]{unseal}, " for d in range(rank)) + ")"
        for part, unseal in enumerate((" >> 2", ""))
    )
    return f"extra[{first}], " + (f"{sizes}, {strides}" if with_sizes else strides)


def _sealed(n: int) -> int:
    """An integer as ``extra`` holds it, whence ``>> 2`` takes it.

    Triton compiles arguments that are 1, or multiples of 16, apart; four times an integer and two is neither.
    """
    return n << 2 | 2


def _sealable(value: Any) -> bool:
    """Whether this is an integer that 32 bits hold sealed; larger ones are passed as they are."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**29) <= value < 2**29


def _values(value: Any, where: torch.device) -> tuple[Any, ...]:
    """What an extra argument puts into ``extra``: itself, or a tensor, its sizes and its strides.

    A size of 1 has stride 0, so that any index reads it where it broadcasts. Strides are left to be told apart by
    Triton, for wide loads need it; other integers are sealed.
    """
    if not isinstance(value, torch.Tensor):
        return (_sealed(value) if _sealable(value) else value,)
    value = value.to(where)
    if value.dtype == torch.bool:
        value = value.view(torch.uint8)
    strides = (0 if size == 1 else stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return (value, *map(_sealed, value.shape), *strides)


def _ranks(aux: tuple[Any, ...]) -> tuple[int | None, ...]:
    """For each extra argument the rank of a tensor, INTEGER, or None for any other number."""
    return tuple(x.ndim if isinstance(x, torch.Tensor) else INTEGER if _sealable(x) else None for x in aux)


@cache
def device_function(
    number: int, ranks: tuple[int | None, ...] = (), positions: int | None = None, first: int = 0
) -> Any:
    """The interned function `number` for kernels, as ``fn(*positional, extra)``.

    Args:
        number: from `interning.intern`.
        ranks: see `_ranks`.
        positions: how many parameters come before the extra ones; None: there are no extra ones, nor ``extra``.
        first: where in ``extra`` its extra arguments begin.
    """
    fn = lookup(number)
    if not isinstance(fn, FunctionType):
        _refuse(fn, "a callable that is no plain function", "use def or lambda")
    names, body = _definition(fn)
    own = [] if positions is None else names[positions:]
    if len(own) != len(ranks):
        _refuse(fn, f"{len(names)} parameters", f"take {len(ranks)} beside the {positions} for positions")
    tables, head = {}, []
    for name, rank in zip(own, ranks, strict=True):
        slot = f"extra[{first}]"
        if rank is None or rank == INTEGER:
            head.append(f"{name} = {slot}" if rank is None else f"{name} = {slot} >> 2")
            first += 1
            continue
        tables[name] = (first, rank)
        if rank == 0:
            head.append(f"{name} = tl.load({slot})")
        first += 1 + 2 * rank
    rewrite = _Rewrite(fn, names, tables)
    body = [rewrite.visit(statement) for statement in body]
    parameters = names if positions is None else [*names[:positions], "extra"]
    shown = ast.parse(f"def function({', '.join(parameters)}):\n    " + "\n    ".join([*head, "pass"])).body[0]
    assert isinstance(shown, ast.FunctionDef)
    shown.body = [*shown.body[:-1], *body]
    return _build("function", ast.unparse(ast.fix_missing_locations(shown)) + "\n", rewrite.bound)


def score_functions(mod: ScoreMod, where: torch.device) -> tuple[Any, Any, tuple[Any, ...]]:
    """``fn(s, b, h, q, k, extra)``, ``dfn(ds, s, b, h, q, k, extra)`` (or None) and their `extra`."""
    ranks = _ranks(mod.aux)
    dfn = None if mod.dfn is None else device_function(intern(mod.dfn), ranks, 6)
    extra = tuple(x for value in mod.aux for x in _values(value, where))
    return device_function(intern(mod.fn), ranks, 5), dfn, extra


class _Composer:
    """Writes a mask expression as one Python expression over ``b, h, q, k, off, extra``."""

    def __init__(self, where: torch.device, first: int) -> None:
        self.where, self.first = where, first
        self.extra: list[Any] = []
        self.bound: dict[str, Any] = {}

    def put(self, value: Any) -> int:
        """Append to ``extra``; the slot."""
        slot = self.first + len(self.extra)
        self.extra.extend(_values(value, self.where))
        return slot

    def number(self, value: int) -> str:
        value = min(value, UNBOUNDED)
        return f"(extra[{self.put(value)}]{' >> 2' if _sealable(value) else ''})"

    def call(self, name: str, function: Any, *arguments: str) -> str:
        self.bound[name] = function
        return f"{name}({', '.join(arguments)})"

    def expression(self, mask: Mask) -> str:
        if isinstance(mask, (And, Or)):
            sign = "&" if isinstance(mask, And) else "|"
            return f"({self.expression(mask.a)} {sign} {self.expression(mask.b)})"
        return f"({self.leaf(mask)})"

    def leaf(self, mask: Mask) -> str:
        if isinstance(mask, masks.Full):
            return "k >= 0"
        if isinstance(mask, masks.Causal):
            return "k <= q + off"
        if isinstance(mask, masks.Window):
            sides = ((mask.left, "q + off - k <= "), (mask.right, "k - q - off <= "))
            return " & ".join(f"({text}{self.number(n)})" for n, text in sides if n is not None) or "k >= 0"
        if isinstance(mask, masks.PrefixLM):
            if not isinstance(mask.prefix, torch.Tensor):
                return f"(k < {self.number(mask.prefix)}) | (k <= q + off)"
            prefix = self.call("_at", at, _slots(self.put(mask.prefix), 1), "(b, )")
            return f"(k < {prefix}) | (k <= q + off)"
        if isinstance(mask, masks.Document):
            return " == ".join(self.of_row(ids, x) for ids, x in ((mask.q_ids, "q"), (mask.keys, "k")))
        if isinstance(mask, masks.Interval):
            ends = ((mask.lo, "k >= "), (mask.hi, "k < "))
            tests = [f"({sign}{self.of_row(ids, 'q')})" for ids, sign in ends if ids is not None]
            return " & ".join(tests) or "k >= 0"
        if isinstance(mask, masks.Dense):
            return self.grid(mask.grid(), "q", "k")
        if isinstance(mask, BlockMask):
            q, k = self.number(mask.block_q), self.number(mask.block_k)
            return self.grid(mask.tiles, f"q // {q}", f"k // {k}")
        if isinstance(mask, masks.Predicate):
            number, ranks, slot = intern(mask.fn), _ranks(mask.aux), self.first + len(self.extra)
            for value in mask.aux:
                self.put(value)
            function = device_function(number, ranks, 4, slot)
            return self.call(f"_user_{number}_{slot}", function, "b", "h", "q", "k", "extra")
        errors.fail(
            errors.UnsupportedError, "mask", type(mask).__name__, "the masks of tilewise.masks", "use Predicate"
        )

    def of_row(self, ids: torch.Tensor, position: str) -> str:
        ids = ids if ids.ndim == 2 else ids[None]
        return self.call("_id_at", id_at, _slots(self.put(ids), 2, with_sizes=False), "b", position)

    def grid(self, x: torch.Tensor, q: str, k: str) -> str:
        return self.call("_grid_at", grid_at, _slots(self.put(x), 4, with_sizes=False), "b", "h", q, k) + " != 0"


_predicates: dict[Any, Any] = {}


def predicate(mask: Mask, where: torch.device, first: int = 0) -> tuple[Any, tuple[Any, ...]]:
    """``visible(b, h, q, k, off, extra)`` of a mask expression, and what it reads in ``extra`` from `first` on."""
    composer = _Composer(where, first)
    text = f"def visible(b, h, q, k, off, extra):\n    return {composer.expression(mask)}\n"
    # Names of user functions hold their number, so equal texts bind equal functions.
    ranks = tuple(_ranks(part.aux) for part in masks.parts(mask) if isinstance(part, masks.Predicate))
    if (text, ranks) not in _predicates:
        _predicates[text, ranks] = _build("visible", text, composer.bound)
    return _predicates[text, ranks], tuple(composer.extra)


def check(options: Options) -> None:
    """Raise UnsupportedError for a user function that cannot be compiled."""
    if options.score_mod is not None:
        score_functions(options.score_mod, torch.device("cpu"))
    for part in masks.parts(options.mask):
        if isinstance(part, masks.Predicate):
            predicate(part, torch.device("cpu"))
