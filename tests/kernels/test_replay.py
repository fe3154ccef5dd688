"""Launches that are replayed: what reaches the driver is what Triton itself would have passed, for other tensors.

No GPU: Triton's launch is replaced by one that writes down what it is given, and gives back a kernel with a launcher
that does the same, in the shape of Triton 3.6's or of 3.7's and later.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

import tilewise
from tilewise import _triton, dispatch, eager, hopper
from tilewise.arguments import prepare
from tilewise.hopper import launch
from tilewise.kernels import replay
from tilewise.problem import Inputs, Problem

# Python functions that a replayed forward pass enters, from entry point to driver, where addresses are new to it:
# one more for the arguments, and one for each descriptor.
FUNCTIONS = 14

Launch = tuple[int, int, tuple[Any, ...]]


class Start:
    """The C function; `spread`: arguments of the kernel one by one (3.6), else as one tuple (3.7).

    `ways`: what the launch asked for: a cooperative grid, and not to wait for the kernel before it.
    """

    def __init__(self, machine: Machine, spread: bool, ways: tuple[bool, bool]) -> None:
        self.machine, self.spread, self.ways = machine, spread, ways

    def __call__(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        assert (y, z, rest[:3]) == (1, 1, ("function", *self.ways))
        if self.spread:
            assert rest[3:9] == (None, None, "metadata", None, None, None)
            arguments = rest[9:]
        else:
            assert rest[3:11] == ("metadata", None, None, None, None, None, "annotations", b"signature")
            (arguments,) = rest[11:]
        self.machine.replayed.append((x, stream, tuple(arguments)))


class CudaLauncher:
    global_scratch_size = profile_scratch_size = 0

    def __init__(self, machine: Machine, options: dict[str, Any]) -> None:
        self.launch_cooperative_grid, self.launch_pdl = ways = (
            options.get("launch_cooperative_grid", False), options.get("launch_pdl", False),
        )  # fmt: skip
        self.launch = Start(machine, machine.spread, ways)
        if not machine.spread:
            self.arg_annotations, self.kernel_signature = "annotations", b"signature"


class Machine:
    """A Hopper GPU without the GPU: lists of launches by way of Triton, and past it."""

    def __init__(self, spread: bool) -> None:
        self.spread, self.device = spread, 0
        self.usual: list[Launch] = []
        self.replayed: list[Launch] = []
        self.utils = SimpleNamespace(fill_tma_descriptor=lambda *given: ("map", *given))
        if not spread:
            self.utils = SimpleNamespace(fill_tma_descriptor_tiled=lambda *given: ("map", *given))

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 77

    def run(self, kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        """In place of `JITFunction.run`."""
        described = [x for x in arguments if hasattr(x, "block_shape")]
        metas = [
            {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": list(x.block_shape), "fp4_padded": False}
            for x in described
        ]
        self.usual.append((grid[0], 77, tuple(self.expanded(arguments, iter(metas)))))
        return SimpleNamespace(
            src=SimpleNamespace(fn=kernel),
            metadata=SimpleNamespace(tensordesc_meta=metas),
            function="function",
            packed_metadata="metadata",
            run=CudaLauncher(self, options),
        )

    def expanded(self, arguments: Sequence[Any], metas: Iterator[Any]) -> Iterator[Any]:
        """Arguments as Triton's launcher passes them on: addresses, and descriptors with shape and strides."""
        for x in arguments:
            if hasattr(x, "block_shape"):
                meta = next(metas)
                kind = (meta["swizzle"], meta["elem_size"], 9, meta["block_size"])
                yield ("map", x.base.data_ptr(), *kind, list(x.shape), list(x.strides), 0)
                yield from (*x.shape, *x.strides)
            elif isinstance(x, tuple):
                yield tuple(y.data_ptr() if isinstance(y, torch.Tensor) else y for y in x)
            else:
                yield x.data_ptr() if isinstance(x, torch.Tensor) else x


@pytest.fixture(params=[True, False], ids=["3.6", "3.7"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    here = Machine(request.param)
    monkeypatch.setattr(triton.runtime.driver, "_active", here)
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *a, **options: here.run(kernel, *a, **options))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    # CPU tensors stand for those of a GPU, whose index is asked of the driver above.
    monkeypatch.delattr(torch._C, "_cuda_getDevice", raising=False)
    monkeypatch.setattr(Problem, "capability", property(lambda problem: (9, 0)))
    monkeypatch.setattr(_triton, "_architecture", lambda problem: "hopper")
    monkeypatch.setattr(_triton, "unsupported_reasons", lambda problem, pass_="forward": [])
    monkeypatch.setattr(dispatch, "BACKENDS", ("hopper", "triton"))
    launch.plan.cache_clear()
    eager.forget()
    yield here
    eager.forget()
    launch.plan.cache_clear()


def tensors(kind: str) -> list[torch.Tensor]:
    """q, k, v as calls have them."""
    if kind == "packed projection":
        return list(torch.randn(2, 130, 3, 4, 64).bfloat16().unbind(2))
    if kind == "heads first":
        return [torch.randn(2, 4, 130, 64).bfloat16().transpose(1, 2) for _ in range(3)]
    if kind == "one for all":
        return [torch.randn(2, 130, 4, 64).bfloat16()] * 3
    return [torch.randn(2, s, h, 64).bfloat16() for s, h in ((130, 4), (150, 2), (150, 2))]


KINDS = ["grouped", "packed projection", "heads first", "one for all"]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "keys that nobody sees": {"window": (3, 2)},
    "top left": {"causal": "top_left", "softmax_scale": 0.3},
}


def attend(inputs: Sequence[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """Every tensor of a call: inputs, options, results."""
    results = tilewise.attention(*inputs, return_lse=True, **options)
    return [*inputs, *(x for x in options.values() if isinstance(x, torch.Tensor)), *results]


def named(launched: Launch, held: Sequence[Any]) -> Any:
    """A launch with addresses replaced by where they point: which tensor and how far into it, or which unknown one."""
    unknown: list[int] = []
    held = [x for x in held if isinstance(x, torch.Tensor)]
    spans = [(x.data_ptr(), x.untyped_storage().data_ptr() + x.untyped_storage().nbytes()) for x in held]

    def name(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(map(name, value))
        if type(value) is int and value > 2**32:
            # Of several tensors in one memory, the one that starts last before it.
            near = [(value - start, i) for i, (start, stop) in enumerate(spans) if start <= value < stop]
            if near:
                return ("in", *min(near))
            unknown.extend([value] if value not in unknown else [])
            return ("unknown", unknown.index(value))
        return getattr(value, "value", value)

    return name(launched)


@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_replay_passes_what_triton_would(machine: Machine, backend: str, kind: str, options: Any) -> None:
    options = {**options, "backend": backend}
    attend(tensors(kind), **options)
    second = attend(tensors(kind), **options)
    third = attend(tensors("packed projection" if kind == "packed projection" else kind), **options)
    assert len(machine.usual) == 2 and len(machine.replayed) == 1
    assert named(machine.replayed[0], third) == named(machine.usual[1], second)


def test_tensors_that_were_one_may_be_three(machine: Machine) -> None:
    for kind in ("one for all", "one for all"):
        attend(tensors(kind), backend="triton")
    inputs = [torch.randn(2, 130, 4, 64).bfloat16() for _ in range(3)]
    held = attend(inputs, backend="triton")
    arguments = named(machine.replayed[-1], held)[2]
    assert [arguments[i][0] for i in range(4)] == [("in", 0, i) for i in range(4)]
    assert arguments[4] == ("in", 0, 4)


MODIFIERS = {
    "sinks": lambda: {"sinks": torch.rand(4)},
    "slopes": lambda: {"alibi_slopes": torch.rand(2, 4)},
    "seed": lambda: {"dropout_seed": torch.tensor(3), "dropout_p": 0.25},
    "softcap": lambda: {"softcap": 5.0},
}


@pytest.mark.parametrize("make", MODIFIERS.values(), ids=MODIFIERS)
def test_tensors_of_options_are_replayed(machine: Machine, make: Any) -> None:
    calls = [attend(tensors("grouped"), backend="triton", **make()) for _ in range(3)]
    assert len(machine.usual) == 2 and len(machine.replayed) == 1
    assert named(machine.replayed[0], calls[2]) == named(machine.usual[1], calls[1])


def test_packed_sequences_are_replayed(machine: Machine) -> None:
    calls = []
    for _ in range(3):
        x, offsets = [torch.randn(10, 2, 64).half() for _ in range(3)], torch.tensor([0, 3, 10])
        out, lse = tilewise.attention_varlen(
            *x, offsets, offsets.clone(), max_seqlen_q=7, max_seqlen_k=7, return_lse=True, backend="triton"
        )
        # Rows of no member are nobody's to write.
        assert torch.equal(out, torch.zeros_like(out)) and torch.equal(lse, torch.full_like(lse, float("-inf")))
        calls.append([*x, offsets, out, lse])
    assert len(machine.usual) == 2 and len(machine.replayed) == 1


def trained(kind: str, with_lse: bool, **options: Any) -> list[Any]:
    """Everything of a call and its gradients."""
    inputs = [x.detach().requires_grad_() for x in tensors(kind)]
    out, lse = tilewise.attention(*inputs, return_lse=True, **options)
    results, incoming = [out, lse][: 1 + with_lse], [torch.randn_like(out), torch.randn_like(lse)][: 1 + with_lse]
    grads = torch.autograd.grad(results, inputs, incoming)
    return [*inputs, *options.values(), out, lse, *incoming, *grads]


@pytest.mark.parametrize("with_lse", [False, True], ids=["out", "out and lse"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_pass_is_replayed(machine: Machine, kind: str, with_lse: bool) -> None:
    # The first call takes the long way, forward and backward; the second is taped.
    passes = []
    for _ in range(3):
        machine.usual.clear()
        held = trained(kind, with_lse, softcap=5.0)
        passes.append([named(launched, held) for launched in (*machine.usual, *machine.replayed)])
    assert not machine.usual and len(machine.replayed) == 4
    assert len(passes[1]) == 4
    assert passes[2] == passes[1]


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"deterministic": True}], ids=str)
def test_a_backward_pass_of_hopper_is_replayed(machine: Machine, options: dict[str, Any]) -> None:
    """Tables that belong to the problem are the same in every call, in records of arguments too."""
    passes = []
    problem = prepare(*tensors("grouped"), **options)[0]
    run = hopper.bind_backward(problem, ("q", "k", "v"))
    for _ in range(2):
        out, do = torch.randn(2, 2, 130, 4, 64).bfloat16().unbind()
        held = [*Inputs(*tensors("grouped")), out, torch.randn(2, 4, 130), do, None]
        held += run(held)
        passes.append([named(launched, held) for launched in (*machine.usual, *machine.replayed)])
        machine.usual.clear()
    assert len(machine.replayed) == 3
    assert passes[1] == passes[0]


def test_gradients_that_pytorch_finishes_are_not_replayed(machine: Machine) -> None:
    def attend(**options: Any) -> int:
        machine.replayed.clear()
        inputs = [x.detach().requires_grad_() for x in tensors("grouped")]
        tilewise.attention(*inputs, **options).sum().backward()
        return len(machine.replayed)

    for _ in range(4):
        # `do` of a sum is one number, expanded, and is copied.
        assert attend(softcap=4.0) <= 1
        assert attend(alibi_slopes=torch.rand(4).requires_grad_()) <= 1


def test_what_the_tape_has_not_seen_come_is_not_replayed(machine: Machine) -> None:
    def shifted() -> torch.Tensor:
        return torch.randn(2 * 130 * 4 * 64 + 1).bfloat16()[1:].view(2, 130, 4, 64)

    for _ in range(4):
        attend([shifted() for _ in range(3)], backend="hopper")  # copied for TMA
        attend(tensors("grouped"), backend="triton", sinks=torch.rand(4, 2)[:, 0])  # made contiguous
    assert len(machine.usual) == 8 and not machine.replayed


def test_an_address_that_the_kernel_was_not_compiled_for_takes_the_usual_way(machine: Machine) -> None:
    for backend in ("hopper", "triton"):
        for _ in range(2):
            attend(tensors("one for all"), backend=backend)
        usual = len(machine.usual)
        x = torch.randn(2 * 130 * 4 * 64 + 1).bfloat16()[1:].view(2, 130, 4, 64)
        attend([x, x, x], backend=backend)
        assert len(machine.usual) == usual + 1 and not machine.replayed


def test_hooks_and_knobs_take_the_usual_way(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def usual_ways() -> int:
        before = len(machine.usual)
        attend(tensors("grouped"), backend="triton")
        return len(machine.usual) - before

    assert [usual_ways() for _ in range(4)] == [1, 1, 0, 0]
    runtime = triton.knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        hook.add(print)
        assert usual_ways() == 1
        hook.remove(print)
        assert usual_ways() == 0
    eager.forget()
    monkeypatch.setattr(runtime, "debug", True)
    assert [usual_ways() for _ in range(3)] == [1, 1, 1]


def test_the_tensors_device_is_current_while_it_works(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []
    for current in (0, 0, 0, 1):
        monkeypatch.setattr(machine, "device", current)
        monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or nullcontext())
        entered.clear()
        attend(tensors("grouped"), backend="hopper")
    assert entered == [0] and len(machine.replayed) == 2


def test_other_launchers_are_left_to_triton(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaLauncher, "global_scratch_size", 128)
    for _ in range(3):
        attend(tensors("grouped"), backend="hopper")
    assert len(machine.usual) == 3 and not machine.replayed


def test_results_are_new_memory_each_time(machine: Machine) -> None:
    inputs = tensors("grouped")
    calls = [tilewise.attention(*inputs, backend="triton", return_lse=True) for _ in range(4)]
    assert len({x.data_ptr() for results in calls for x in results}) == 8
    assert len({(x.shape, x.stride(), x.dtype) for out, lse in calls for x in (out, lse)}) == 2
    with torch.inference_mode():
        assert all(x.is_inference() for x in tilewise.attention(*inputs, backend="triton", return_lse=True))


def test_addresses_that_change_do_not_pile_up(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_ADDRESSES", 4)
    held = [attend(tensors("grouped"), backend="hopper") for _ in range(20)]
    (call,) = eager._calls.values()
    (step,) = call.forward._replay._launches
    assert len(held) == 20 and len(step._made) <= 4
    assert all(len(change.encode._made) <= 4 for change in step._changes if change.encode)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_no_tensor_is_kept(machine: Machine, backend: str, training: bool) -> None:
    def serve() -> set[int]:
        options = {"backend": "triton"} if backend == "triton" else {}
        attended = trained("grouped", True, **options) if training else attend(tensors("grouped"), **options)
        return {x.data_ptr() for x in attended if isinstance(x, torch.Tensor)}

    before = {id(x) for x in gc.get_objects()}
    addresses = set().union(*(serve() for _ in range(3)))
    assert machine.replayed
    gc.collect()
    alive = [x for x in gc.get_objects() if id(x) not in before and type(x) is torch.Tensor]
    assert not [x.shape for x in alive if x.data_ptr() in addresses]


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_a_replayed_call_enters_few_functions(machine: Machine, backend: str) -> None:
    inputs, entered = tensors("grouped"), []
    for _ in range(3):
        tilewise.attention(*inputs, causal=True, backend=backend)

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_globals["__name__"].partition(".")[0] in ("tilewise", "torch", "triton"):
            entered.append(frame.f_code.co_name)

    rounds: list[list[str]] = []
    for _ in range(20):
        entered.clear()
        sys.setprofile(profile)
        try:
            tilewise.attention(*inputs, causal=True, backend=backend)
        finally:
            sys.setprofile(None)
        rounds.append(list(entered))
    assert len(machine.replayed) == 21
    # Not in every round: what else happens to run meanwhile, such as a collection of garbage, and descriptors made for
    # an address that the allocator has not handed out before.
    fewest = min(rounds, key=len)
    assert len(fewest) <= FUNCTIONS, fewest
