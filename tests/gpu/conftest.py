"""These tests need a GPU, those in test_devices two of them: elsewhere they are not collected."""

from __future__ import annotations

import torch

_NEEDS_TWO = ["test_devices.py"]
collect_ignore = _NEEDS_TWO if torch.cuda.device_count() < 2 else []
collect_ignore_glob = [] if torch.cuda.is_available() else ["*.py"]
