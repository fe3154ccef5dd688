"""The layer rule: imports go down, or sideways without cycles, never up."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "tilewise"

# The first part of a module's name inside the package decides its layer.
LAYERS = {
    0: "errors interning problem dropout masks mask_algebra block_masks score_mods sequences tiles roofline kvcache",
    1: "reference softmax products quantize arguments checks cache_arguments cache_checks",
    2: "cpu kernels _triton hopper decode textbook",
    3: "autograd cached cache_operators dispatch eager eager_cache served sharding batching axes",
    4: "__init__ __main__ api nn jagged cache_api paged_cache shared_prefix warming explanation surroundings cli demo "
    "bench report integrations compat distributed",
}
LEVEL = {part: level for level, parts in LAYERS.items() for part in parts.split()}

# All need Triton, so nothing may load them before it is known to be there.
KERNELS = {"kernels", "_triton", "hopper"}
# The oracle is for checking: the demo prints how far its attention is from it, the benchmarks time nothing wrong.
MAY_IMPORT_REFERENCE = {"bench", "demo", "reference"}


class Import(NamedTuple):
    """One imported module, as a dotted name; `lazy` inside a function, `typing` under TYPE_CHECKING."""

    name: str
    line: int
    lazy: bool
    typing: bool


def module_name(path: Path, root: Path = PACKAGE) -> str:
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def part_of(module: str) -> str:
    """The part of the package that a module belongs to: tilewise.cpu.forward is in cpu."""
    return module.split(".")[1] if "." in module else "__init__"


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    base = module.split(".")
    base = base[: len(base) - node.level + is_package]
    return ".".join([*base, *([node.module] if node.module else [])])


def _names(node: ast.AST, module: str, is_package: bool, known: set[str]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        source = _absolute(node, module, is_package)
        members = [f"{source}.{alias.name}" for alias in node.names]
        return [member if member in known else source for member in members]
    return []


def imports(tree: ast.AST, module: str, is_package: bool, known: set[str]) -> Iterator[Import]:
    """Every import statement in a module, wherever it stands."""

    def visit(node: ast.AST, lazy: bool, typing: bool) -> Iterator[Import]:
        for name in _names(node, module, is_package, known):
            yield Import(name, node.lineno, lazy, typing)  # type: ignore[attr-defined]  # statements have lines
        lazy = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        typing = typing or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for child in ast.iter_child_nodes(node):
            yield from visit(child, lazy, typing)

    yield from visit(tree, False, False)


def imports_of(module: str) -> list[Import]:
    path = MODULES[module]
    return list(imports(ast.parse(path.read_text()), module, path.name == "__init__.py", set(MODULES)))


def own(found: list[Import]) -> list[Import]:
    return [item for item in found if item.name.split(".")[0] == "tilewise"]


def problems(module: str, found: list[Import]) -> list[str]:
    """What is wrong with the imports of one module."""
    source, wrong = part_of(module), []
    for item in own(found):
        target = part_of(item.name)
        where = f"{module}:{item.line} imports {item.name}: "
        if source == target or not {source, target} <= LEVEL.keys():  # unknown parts have a test of their own
            continue
        if LEVEL[target] > LEVEL[source]:
            wrong.append(where + f"up, from layer {LEVEL[source]} to {LEVEL[target]}")
        if source in KERNELS and target in KERNELS and target != "kernels":
            wrong.append(where + "the kernel backends do not know each other")
        if target in KERNELS and source not in KERNELS and not item.lazy and not item.typing:
            wrong.append(where + "a kernel backend is imported inside the function that needs it")
        if source == "textbook" and LEVEL[target] > 1:
            wrong.append(where + "the textbook stands on layers 0 and 1 alone")
        if target == "reference" and source not in MAY_IMPORT_REFERENCE:
            wrong.append(where + "the oracle is for tests, docs, benchmarks and the demo")
    for item in found:
        if item.name.split(".")[0] == "triton" and source not in KERNELS and not item.lazy:
            wrong.append(f"{module}:{item.line} imports triton: only the kernel backends may, elsewhere lazily")
    return wrong


def test_every_module_has_a_layer() -> None:
    unknown = {part_of(module) for module in MODULES} - set(LEVEL)
    assert not unknown, f"add these to LAYERS: {sorted(unknown)}"


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module: str) -> None:
    assert not problems(module, imports_of(module))


def test_no_cycles() -> None:
    graph = {
        module: {item.name for item in own(imports_of(module)) if not item.typing and item.name != module}
        for module in MODULES
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize(
    "module, source, complaint",
    [
        ("tilewise.masks", "from .api import attention", "up, from layer 0 to 4"),
        ("tilewise.masks", "def f():\n    from tilewise import dispatch", "up, from layer 0 to 3"),
        ("tilewise.cpu.forward", "from ..autograd import op", "up, from layer 2 to 3"),
        ("tilewise.hopper.forward", "def f():\n    from .._triton import forward", "do not know each other"),
        ("tilewise.kernels.score", "from .._triton import forward", "do not know each other"),
        ("tilewise.dispatch", "from . import hopper", "inside the function"),
        ("tilewise.textbook.v1", "from .. import cpu", "layers 0 and 1 alone"),
        ("tilewise.api", "from .reference import attention", "the oracle is for"),
        ("tilewise.problem", "import triton.language as tl", "imports triton"),
    ],
)
def test_rule_catches(module: str, source: str, complaint: str) -> None:
    known = {f"tilewise.{part}" for part in LEVEL} | {"tilewise._triton.forward"}
    found = list(imports(ast.parse(source), module, False, known))
    assert any(complaint in problem for problem in problems(module, found)), found


def test_rule_allows_what_is_right() -> None:
    source = "from .masks import Causal\ndef serve():\n    from .hopper import forward\n    import triton\n"
    assert not problems("tilewise.dispatch", list(imports(ast.parse(source), "tilewise.dispatch", False, set())))
