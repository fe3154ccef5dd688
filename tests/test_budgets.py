"""Limits that keep pieces readable: length of functions and files, number of parameters, reasons for exceptions."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "tools", "benchmarks", "examples")
CODE = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
PACKAGE = [path for path in CODE if path.is_relative_to(ROOT / "src")]
PAGE = [path for path in sorted((ROOT / "src" / "tilewise" / "report" / "page").iterdir()) if path.is_file()]

FILE_LINES = 500
HOST_LINES, KERNEL_LINES = 60, 120
PARAMETERS = 8

THEIRS = {
    f"{prefix}{name}"
    for prefix in ("flash_attn", "_flash_attn")
    for name in (
        "_func", "_kvpacked_func", "_qkvpacked_func", "_varlen_func", "_varlen_kvpacked_func", "_varlen_qkvpacked_func",
        "_with_kvcache", "_forward", "_varlen_forward", "_backward", "_varlen_backward",
    )
}  # fmt: skip

# The one long signature: the entry points and what has to repeat theirs.
LONG_SIGNATURES = {
    "api.py": {"attention", "attention_varlen"},
    "cache_api.py": {"attention_with_kvcache"},
    "shared_prefix.py": {"attention_with_shared_prefix"},
    "paged_cache.py": {"__init__"},
    "explanation.py": {"explain"},
    "arguments.py": {"prepare"},
    "cli.py": {"explain"},
    # Signatures of others.
    **dict.fromkeys(("flash_attn.py", "flash_attn_3.py", "flash_attn_kvcache.py", "flash_attn_interface.py"), THEIRS),
    "flash_attn_rotary_kernel.py": {"apply_rotary"},
    "flex.py": {"flex"},
    "nn.py": {"__init__"},
    "torch_sdpa.py": {"_flash_backward", "_flash_forward", "_sdpa_backward"},
    "transformers.py": {"attention"},
    "transformers_masks.py": {"attention_mask"},
}

Function: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(path: Path) -> Iterator[Function]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def is_kernel(function: Function) -> bool:
    """Whether the function is compiled by Triton or Gluon; its pointers and constants are no host parameters."""
    return any(re.search(r"\bjit\b|constexpr_function|aggregate", ast.unparse(d)) for d in function.decorator_list)


def body_lines(function: Function) -> int:
    """Lines from the signature to the end, without the docstring."""
    first = function.body[0]
    has_docstring = ast.get_docstring(function, clean=False) is not None
    docstring = (first.end_lineno or 0) - first.lineno + 1 if has_docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def parameters(function: Function) -> int:
    a = function.args
    names = [arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")]) + bool(a.vararg) + bool(a.kwarg)


@pytest.mark.parametrize("path", CODE + PAGE, ids=label)
def test_files_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= FILE_LINES


@pytest.mark.parametrize("path", CODE, ids=label)
def test_functions_are_short(path: Path) -> None:
    long = {
        f"{function.name}:{function.lineno}": body_lines(function)
        for function in functions(path)
        if body_lines(function) > (KERNEL_LINES if is_kernel(function) else HOST_LINES)
    }
    assert not long


@pytest.mark.parametrize("path", PACKAGE, ids=label)
def test_functions_take_few_parameters(path: Path) -> None:
    allowed = LONG_SIGNATURES.get(path.name, set())
    wide = {
        f"{function.name}:{function.lineno}": parameters(function)
        for function in functions(path)
        if parameters(function) > PARAMETERS and function.name not in allowed and not is_kernel(function)
    }
    assert not wide


# An exception names its rule, then its reason after a dash or in a comment of its own.
EXCEPTION = re.compile(r"#\s*(type:\s*ignore|noqa)")
REASONED = re.compile(r"#\s*(type:\s*ignore\[[\w, -]+\]|noqa:\s*[A-Z]+\d+(,\s*[A-Z]+\d+)*)\s*(#|-|–)\s*\S.{5,}")


@pytest.mark.parametrize("path", CODE, ids=label)
def test_exceptions_have_reasons(path: Path) -> None:
    with path.open("rb") as file:
        comments = [token for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]
    bare = [
        f"{token.start[0]}: {token.string}"
        for token in comments
        if EXCEPTION.search(token.string) and not REASONED.search(token.string)
    ]
    assert not bare
