"""Unmodified code finds this package under the names of others: each claim in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import guards
import tilewise.compat
from tilewise import errors


def run(code: str, *flags: str) -> Any:
    """What `code` says in `said`, in a new interpreter that fails on warnings."""
    text = f"import json\nsaid = None\n{code}\nprint(json.dumps(said))"
    command = [sys.executable, "-W", "error", *flags, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=guards.SECONDS)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


INSTALLED = "import tilewise.compat\ntilewise.compat.install('flash_attn')\n"


def test_imports() -> None:
    """As unmodified code writes them."""
    said = run(
        INSTALLED
        + """
import torch, flash_attn, flash_attn_interface
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash_attn import flash_attn_qkvpacked_func, flash_attn_kvpacked_func
from flash_attn.flash_attn_interface import flash_attn_varlen_qkvpacked_func, _flash_attn_forward
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
from flash_attn.ops.triton.rotary import apply_rotary
import flash_attn.layers.rotary as rotary
x = torch.randn(1, 5, 2, 16)
same = torch.equal(flash_attn_func(x, x, x, causal=True), flash_attn_interface.flash_attn_func(x, x, x, causal=True))
said = [flash_attn.__version__, flash_attn_interface.__version__, same, flash_attn.layers.rotary is rotary]
"""
    )
    assert said == ["2.8.3+tilewise", "3.0.0+tilewise", True, True]


def test_it_is_found_as_a_package_is() -> None:
    said = run(
        INSTALLED
        + """
import sys
from importlib import metadata, util
from packaging.version import parse
util.find_spec("flash_attn")
said = {
    "imported": "flash_attn" in sys.modules,
    "specs": [util.find_spec(name) is not None for name in (
        "flash_attn", "flash_attn.layers.rotary", "flash_attn_interface", "flash_attn.cute", "flash_attn.losses",
    )],
    "versions": [metadata.version(name) for name in ("flash_attn", "flash-attn", "Flash.Attn", "flash-attn-3")],
    "new_enough": parse("2.3.3") < parse(metadata.version("flash_attn")) > parse("2.8.3"),
    "owners": [metadata.packages_distributions().get(name) for name in ("flash_attn", "flash_attn_interface")],
    "name": metadata.metadata("flash_attn")["Name"],
    "others": metadata.version("torch").startswith("2."),
}
"""
    )
    assert said == {
        "specs": [True, True, True, False, False],
        "imported": False,
        "versions": ["2.8.3+tilewise"] * 3 + ["3.0.0+tilewise"],
        "new_enough": True,
        "owners": [["flash-attn"], ["flash-attn-3"]],
        "name": "flash-attn",
        "others": True,
    }


def test_transformers_finds_it() -> None:
    """Its checks, but for the one for a GPU."""
    said = run(
        INSTALLED
        + """
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers.utils import import_utils
    import_utils.is_torch_cuda_available = lambda: True
    said = [
        import_utils.is_flash_attn_2_available(), import_utils.is_flash_attn_3_available(),
        import_utils.is_flash_attn_4_available(), import_utils.is_flash_attn_greater_or_equal("2.4.1"),
    ]
    from transformers.modeling_flash_attention_utils import _lazy_imports
    said += [fn.__module__ for fn in _lazy_imports("flash_attention_2")]
    said += [fn.__module__ for fn in _lazy_imports("flash_attention_3")[:3]]
"""
    )
    # The third is for flash-attn 4, of which there is no stand-in.
    assert said[:4] == [True, True, False, True]
    assert said[4:7] == ["tilewise.compat.flash_attn"] * 2 + ["tilewise.compat.flash_attn_kvcache"]
    assert said[7:9] == ["tilewise.compat.flash_attn_padding"] * 2
    assert said[9:] == ["tilewise.compat.flash_attn_3"] * 3


def test_a_model_of_transformers_runs_unmodified() -> None:
    """Packed, padded and plain, as with its own attention; the model's code calls `flash_attn`, and finds this."""
    said = run(
        INSTALLED
        + """
import copy, warnings
warnings.simplefilter("ignore")
import torch, transformers
from transformers.utils import import_utils
from transformers import modeling_flash_attention_utils as utils
import_utils.is_torch_cuda_available = lambda: True
config = transformers.LlamaConfig(
    vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)
torch.manual_seed(0)
eager = transformers.LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
flash = transformers.LlamaForCausalLM._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
flash.load_state_dict(eager.state_dict())
transformers.modeling_utils.PreTrainedModel._flash_attn_can_dispatch = lambda *a, **k: True
flash.set_attn_implementation("flash_attention_2")
ids = torch.randint(50, (2, 11))
mask = torch.ones_like(ids)
mask[0, :4] = 0
with torch.no_grad():
    plain = (flash(ids).logits - eager(ids).logits).abs().max()
    padded = flash(ids, attention_mask=mask).logits - eager(ids, attention_mask=mask).logits
    padded = (padded * mask[..., None]).abs().max()
    tokens = [model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False) for model in (flash, eager)]
module = utils._flash_fn.__module__
said = [float(plain), float(padded), bool(torch.equal(*tokens)), module]
"""
    )
    assert said[0] < 1e-5 and said[1] < 1e-5
    assert said[2:] == [True, "tilewise.compat.flash_attn"]


def test_what_was_there_is_restored() -> None:
    said = run(
        """
import sys, types
real = types.ModuleType("flash_attn")
real.flash_attn_func = "real"
cute = types.ModuleType("flash_attn.cute")
sys.modules["flash_attn"], sys.modules["flash_attn.cute"] = real, cute
import tilewise.compat
before = list(sys.meta_path)
tilewise.compat.install("flash_attn")
tilewise.compat.install("flash_attn")
import flash_attn
from flash_attn import flash_attn_func, bert_padding
said = [flash_attn is real, "flash_attn.cute" in sys.modules, len(sys.meta_path) - len(before)]
tilewise.compat.uninstall("flash_attn")
tilewise.compat.uninstall("flash_attn")
import flash_attn
said += [flash_attn is real, sys.modules["flash_attn.cute"] is cute, sys.meta_path == before]
said += [sorted(name for name in sys.modules if name.startswith("flash_attn")), flash_attn_func.__module__]
"""
    )
    assert said[:3] == [False, False, 1]
    assert said[3:] == [True, True, True, ["flash_attn", "flash_attn.cute"], "tilewise.compat.flash_attn"]


def test_nothing_is_left_behind() -> None:
    said = run(
        INSTALLED
        + """
import flash_attn.layers.rotary, flash_attn_interface
tilewise.compat.uninstall("flash_attn")
from importlib import metadata, util
said = [util.find_spec("flash_attn") is None, util.find_spec("flash_attn_interface") is None]
try:
    metadata.version("flash_attn")
except metadata.PackageNotFoundError:
    said.append("no metadata")
"""
    )
    assert said == [True, True, "no metadata"]


def test_other_parts_of_it_are_missing() -> None:
    code = (
        INSTALLED
        + "\ntry:\n    import flash_attn.losses.cross_entropy\nexcept ImportError as error:\n    said = str(error)"
    )
    assert run(code) == "No module named 'flash_attn.losses'"


def test_importing_compat_imports_nothing_of_it() -> None:
    code = "import sys\nimport tilewise.compat\nsaid = [name for name in sys.modules if 'flash_attn' in name]"
    assert run(code) == []


def test_after_transformers_is_too_late() -> None:
    code = """
import sys, types, warnings
sys.modules["transformers"] = types.ModuleType("transformers")
import tilewise.compat
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    tilewise.compat.install("flash_attn")
said = [str(w.message) for w in caught]
"""
    (message,) = run(code)
    assert "transformers looks for packages when it is imported" in message


@pytest.mark.parametrize("fn", [tilewise.compat.install, tilewise.compat.uninstall])
def test_unknown_names_are_refused(fn: Any) -> None:
    with pytest.raises(errors.ArgumentError, match="library: got 'xformers'; supported: 'flash_attn'"):
        fn("xformers")
