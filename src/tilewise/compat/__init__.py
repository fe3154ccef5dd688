"""Other libraries' functions, by their names and conventions, over the kernels of this package.

`compat.sdpa` has PyTorch's `scaled_dot_product_attention`; `compat.flash_attn` and `compat.flash_attn_3` those
of flash-attn 2 and 3. An argument that cannot be honoured is refused by name, with the native way to get the same.
`install("flash_attn")` puts the latter two where ``import flash_attn`` finds them.
"""

from __future__ import annotations

from .installation import install, uninstall

__all__ = ["install", "uninstall"]
