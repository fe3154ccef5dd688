"""Modules with the names of other libraries, so that code which imports those runs over this package unchanged.

A finder in front of Python's own serves the names, and the package metadata that others look for: what is installed
under these names, if anything, is hidden until `uninstall`.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module, metadata
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from ..errors import ArgumentError, fail

_Modules: TypeAlias = "dict[str, str | None]"
_Distributions: TypeAlias = "dict[str, tuple[str, str]]"

# By name: the module here that has the contents, or None for a package that only holds others.
_FLASH_ATTN: _Modules = {
    "flash_attn": "flash_attn",
    "flash_attn.flash_attn_interface": "flash_attn_interface",
    "flash_attn.bert_padding": "flash_attn_padding",
    "flash_attn.layers": None,
    "flash_attn.layers.rotary": "flash_attn_rotary",
    "flash_attn.ops": None,
    "flash_attn.ops.triton": None,
    "flash_attn.ops.triton.rotary": "flash_attn_rotary_kernel",
    "flash_attn_interface": "flash_attn_3",
}
# By top-level module: the distribution that others take it to come from, and the release whose names and signatures it
# has. The local part of the version marks the stand-in, and orders it after the release.
_DISTRIBUTIONS: _Distributions = {
    "flash_attn": ("flash-attn", "2.8.3+tilewise"),
    "flash_attn_interface": ("flash-attn-3", "3.0.0+tilewise"),
}
_LIBRARIES = {"flash_attn": (_FLASH_ATTN, _DISTRIBUTIONS)}

_installed: dict[str, tuple[_Finder, dict[str, ModuleType]]] = {}


def install(library: str) -> None:
    """Let ``import flash_attn`` find this package's functions; undone by `uninstall`. Twice is as once.

    It serves `flash_attn` with `flash_attn_interface`, `bert_padding` and `layers.rotary` below it, the top-level
    `flash_attn_interface` of flash-attn 3, `importlib.util.find_spec` and `importlib.metadata` for both. Other modules
    of flash-attn (its layers, losses and models) are not there, and importing them says so.

    Args:
        library: "flash_attn".

    Raises:
        tilewise.errors.ArgumentError: there is no stand-in of this name.

    Example:
        >>> import tilewise.compat
        >>> tilewise.compat.install("flash_attn")
        >>> import flash_attn
        >>> flash_attn.flash_attn_func.__module__
        'tilewise.compat.flash_attn'
        >>> tilewise.compat.uninstall("flash_attn")
    """
    modules, distributions = _known(library)
    if library in _installed:
        return
    if "transformers" in sys.modules:
        text = "transformers looks for packages when it is imported, so it will not see this one: install before that"
        warnings.warn(text, UserWarning, stacklevel=2)
    finder = _Finder(modules, distributions)
    # What was imported under these names, submodules that the stand-in lacks included.
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in distributions}
    for name in hidden:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    _installed[library] = finder, hidden


def uninstall(library: str) -> None:
    """Undo `install`: what was there before is found again. Functions that were imported meanwhile keep working.

    Args:
        library: "flash_attn".

    Raises:
        tilewise.errors.ArgumentError: there is no stand-in of this name.
    """
    _, distributions = _known(library)
    if library not in _installed:
        return
    finder, hidden = _installed.pop(library)
    sys.meta_path.remove(finder)
    for name in [name for name in sys.modules if name.partition(".")[0] in distributions]:
        del sys.modules[name]
    sys.modules.update(hidden)


def _known(library: str) -> tuple[_Modules, _Distributions]:
    if library not in _LIBRARIES:
        fix = "PyTorch's attention is replaced through tilewise.integrations.torch_sdpa"
        fail(ArgumentError, "library", repr(library), " or ".join(map(repr, _LIBRARIES)), fix)
    return _LIBRARIES[library]


class _Finder(metadata.DistributionFinder):
    """Finds the modules and the distributions of one stand-in."""

    def __init__(self, modules: _Modules, distributions: _Distributions) -> None:
        self._modules, self._distributions = modules, distributions

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._modules:
            return None
        is_package = any(name.startswith(f"{fullname}.") for name in self._modules)
        return ModuleSpec(fullname, _Loader(self._modules[fullname]), is_package=is_package)

    def find_distributions(self, context: Any = None) -> Iterator[metadata.Distribution]:
        wanted = None if context is None or context.name is None else re.sub(r"[-_.]+", "-", context.name).lower()
        for top_level, (name, version) in self._distributions.items():
            if wanted in (None, name):
                yield _Distribution(name, version, top_level)


class _Loader(Loader):
    """Fills a module with the public names of one of this package's."""

    def __init__(self, source: str | None) -> None:
        self._source = source

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        if self._source is not None:
            source = import_module(f"{__package__}.{self._source}")
            module.__doc__ = source.__doc__
            vars(module).update({name: getattr(source, name) for name in source.__all__})
        if module.__name__ in _DISTRIBUTIONS:
            vars(module)["__version__"] = _DISTRIBUTIONS[module.__name__][1]


class _Distribution(metadata.Distribution):
    """The metadata of a package that is not there, as far as others read it."""

    def __init__(self, name: str, version: str, top_level: str) -> None:
        self._files = {
            "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            "top_level.txt": f"{top_level}\n",
        }

    def read_text(self, filename: str) -> str | None:
        return self._files.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / path
