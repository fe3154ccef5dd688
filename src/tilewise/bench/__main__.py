"""``python -m tilewise.bench``."""

from __future__ import annotations

import sys

from .. import errors
from . import main

if __name__ == "__main__":
    try:
        sys.exit(main())
    except errors.TilewiseError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
