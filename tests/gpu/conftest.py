"""These tests need a GPU, test_devices two of them, test_races a Hopper: where there is none they are not collected."""

from __future__ import annotations

import torch

_CAN = torch.cuda.is_available()
_NEEDS = {
    "test_devices.py": torch.cuda.device_count() >= 2,
    "test_races.py": _CAN and torch.cuda.get_device_capability() == (9, 0),
}
collect_ignore = [name for name, met in _NEEDS.items() if not met]
collect_ignore_glob = [] if _CAN else ["*.py"]
