"""Limits against hangs."""

from __future__ import annotations

# For what takes seconds on an idle machine: no test is to fail because its machine is slow or busy.
SECONDS = 1200
