"""What the demo needs beyond the package itself."""

from __future__ import annotations

from importlib.util import find_spec

from ..errors import UnsupportedError, fail


def require(package: str, purpose: str) -> None:
    """Raise, before any work, unless `package` is installed.

    Raises:
        UnsupportedError: it is not; names the extra that brings it.
    """
    if find_spec(package) is None:
        fail(
            UnsupportedError,
            "demo",
            f"a Python without {package}, which {purpose}",
            "an installation with the extra 'demo'",
            "pip install 'tilewise[demo]'",
        )
