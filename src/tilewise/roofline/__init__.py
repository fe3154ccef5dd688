"""What attention must cost: operations, HBM traffic, memory and time.

`calls` counts what one call of this library must cost at least, `forms` holds the closed forms of the textbook's
algorithms, `tile_rules` says which tiles fit into SRAM, and `devices` what GPUs can do.
"""

from . import forms, tile_rules
from .calls import (
    BACKWARD,
    FORWARD,
    Pairs,
    floor_ms,
    flops,
    hbm_bytes,
    products,
    score_matrix_bytes,
    standard_hbm_bytes,
    tensor_bytes,
    visible_pairs,
)
from .devices import DEVICES, Device, device, device_of, named

__all__ = [
    "BACKWARD",
    "DEVICES",
    "FORWARD",
    "Device",
    "Pairs",
    "device",
    "device_of",
    "floor_ms",
    "flops",
    "forms",
    "hbm_bytes",
    "named",
    "products",
    "score_matrix_bytes",
    "standard_hbm_bytes",
    "tensor_bytes",
    "tile_rules",
    "visible_pairs",
]
