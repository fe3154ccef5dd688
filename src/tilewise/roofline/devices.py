"""What devices can do: peak rates, memory sizes and the balance between them, each with its source."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from .. import errors


@dataclass(frozen=True)
class Device:
    """Peak rates and sizes of a device, by its vendor (dense, no sparsity).

    Args:
        name: as the command line takes it.
        tflops_16bit: fp16/bf16 matrix products with fp32 accumulation, TFLOP/s.
        tflops_fp8: fp8 matrix products with fp32 accumulation, TFLOP/s; None where there are none.
        tflops_fp32: fp32 outside the tensor cores (true fp32), TFLOP/s.
        hbm_tb_s: memory bandwidth, TB/s.
        hbm_gb: memory size, GB.
        sram_kib: shared memory that one thread block can have, KiB.
        sram_sm_kib: L1 and shared memory of one SM together, KiB.
        l2_mb: L2 cache, MB.
        sms: streaming multiprocessors.
        capability: CUDA compute capability.
        names: regular expression for what the driver calls it, lower case, without spaces and hyphens. Variants of
            other rates (PCIe, NVL, Grace) are other devices.
        source: where the figures stand.
    """

    name: str
    tflops_16bit: float
    tflops_fp8: float | None
    tflops_fp32: float
    hbm_tb_s: float
    hbm_gb: int
    sram_kib: int
    sram_sm_kib: int
    l2_mb: int
    sms: int
    capability: tuple[int, int]
    names: str
    source: str

    def tflops(self, dtype: torch.dtype) -> float:
        """The rate for products of this dtype.

        Raises:
            tilewise.errors.UnsupportedError: fp8 on a device whose tensor cores have no fp8.

        >>> device("h200").tflops(torch.float8_e4m3fn), device("h200").tflops(torch.float32)
        (1978.9, 66.9)
        """
        if dtype.itemsize == 1 and dtype.is_floating_point:
            if self.tflops_fp8 is None:
                able = ", ".join(other.name for other in DEVICES.values() if other.tflops_fp8 is not None)
                fix = "name one of them, or a 16-bit dtype"
                errors.fail(errors.UnsupportedError, "dtype", f"{dtype} on {self.name}", f"fp8 on {able}", fix)
            return self.tflops_fp8
        return self.tflops_16bit if dtype.itemsize <= 2 else self.tflops_fp32

    def balance(self, dtype: torch.dtype) -> float:
        """FLOPs per byte at which arithmetic and memory take equally long: left of it memory decides, right arithmetic.

        >>> round(device("a100-40gb").balance(torch.float16)), round(device("a100-80gb").balance(torch.float16))
        (201, 153)
        """
        return self.tflops(dtype) / self.hbm_tb_s

    def sram_elements(self, dtype: torch.dtype) -> int:
        """The papers' M: elements of this dtype in the SRAM of one SM (per SM, not of the whole chip).

        >>> device("a100-40gb").sram_elements(torch.float16)
        98304
        """
        return self.sram_sm_kib * 1024 // dtype.itemsize


# Shared memory for one block: CUDA C++ Programming Guide, table of compute capabilities. fp8 of the RTX 4090 is with
# fp32 accumulation, twice as fast with fp16. The B200's driver says 7.67 TB/s (7680 bits) where its datasheet says 8.
_A100 = "NVIDIA A100 datasheet (2021); A100 whitepaper (2020), table 4"
_H100 = "NVIDIA H100 datasheet (2023), SXM column; H100 whitepaper (2022), tables 1 and 4"
_H200 = "NVIDIA H200 datasheet (2024), SXM column; SMs, L1 and L2 as the H100 SXM"
_B200 = "NVIDIA HGX B200 datasheet (2025), an eighth of the board; SMs and L2 as its driver reports them"
_ADA = "NVIDIA Ada GPU architecture whitepaper (2022), table of the GeForce RTX 4090"
DEVICES = {
    device.name: device
    for device in (
        # name, TFLOP/s of 16-bit, fp8 and fp32, TB/s, GB, KiB of a block and of an SM, MB of L2, SMs
        Device("a100-40gb", 312.0, None, 19.5, 1.555, 40, 163, 192, 40, 108, (8, 0), r"a100.*40gb", _A100),
        Device("a100-80gb", 312.0, None, 19.5, 2.039, 80, 163, 192, 40, 108, (8, 0), r"a100.*80gb", _A100),
        Device("rtx4090", 165.2, 330.3, 82.6, 1.008, 24, 99, 128, 72, 128, (8, 9), r"rtx4090$", _ADA),
        Device("h100", 989.4, 1978.9, 66.9, 3.35, 80, 227, 256, 50, 132, (9, 0), r"(?<!g)h100(?!pcie|nvl)", _H100),
        Device("h200", 989.4, 1978.9, 66.9, 4.8, 141, 227, 256, 50, 132, (9, 0), r"(?<!g)h200(?!nvl)", _H200),
        Device("b200", 2250.0, 4500.0, 75.0, 8.0, 180, 227, 256, 126, 148, (10, 0), r"(?<!g)b200", _B200),
    )
}


def device(name: str) -> Device:
    """A device of the table by its name.

    Raises:
        tilewise.errors.ArgumentError: unknown name.
    """
    if name.lower() not in DEVICES:
        errors.fail(errors.ArgumentError, "device", repr(name), ", ".join(DEVICES), "name one of these")
    return DEVICES[name.lower()]


def device_of(tensor_device: torch.device) -> Device | None:
    """The table's entry for the GPU that tensors are on; None for CPUs and GPUs that it lacks."""
    if tensor_device.type != "cuda" or not torch.cuda.is_available():
        return None
    return named(torch.cuda.get_device_name(tensor_device))


def named(name: str) -> Device | None:
    """The table's entry for a driver's name of a GPU, or None.

    >>> named("NVIDIA A100-SXM4-80GB").name, named("NVIDIA H200").name, named("NVIDIA GH200 480GB")
    ('a100-80gb', 'h200', None)
    """
    plain = name.lower().replace(" ", "").replace("-", "")
    return next((entry for entry in DEVICES.values() if re.search(entry.names, plain)), None)
