"""A call like an earlier one: the same results and the same errors, without the earlier one's checks and choices."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise
from tilewise import Causal, Document, Predicate, ScoreMod, Window, dispatch, eager, served
from tilewise.errors import ArgumentError, DtypeError, ShapeError, TilewiseError, UnsupportedError

# Python functions that a known call may enter. Each costs about 0.1 us, and what it does at least as much.
FUNCTIONS = 11


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    eager.forget()
    yield
    eager.forget()


def tensors(seqlen: int = 6, grad: bool = False) -> list[torch.Tensor]:
    """q, k, v with grouped heads and another head dim for values."""
    generator = torch.Generator().manual_seed(seqlen)
    shapes = ((2, seqlen, 4, 8), (2, seqlen + 2, 2, 8), (2, seqlen + 2, 2, 6))
    return [torch.randn(shape, generator=generator).requires_grad_(grad) for shape in shapes]


def modifier(*shape: int) -> torch.Tensor:
    return torch.linspace(0.1, 1.0, torch.Size(shape).numel()).view(shape)


def known() -> int:
    """How many calls are remembered."""
    return len(eager._calls)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "top_left": {"causal": "top_left"},
    "window": {"window": (2, 1)},
    "window_value": {"window": Window(2, 1), "causal": True},
    "mask_value": {"mask": Causal() & Window(3, None)},
    "softcap": {"softcap": 3},
    "scale": {"softmax_scale": 0.5, "return_lse": True},
    "slopes": {"alibi_slopes": modifier(4)},
    "bias": {"bias": modifier(4, 6, 8)},
    "sinks": {"sinks": modifier(4), "return_lse": True},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 5},
    "dropout_seed_tensor": {"dropout_p": 0.3, "dropout_seed": torch.tensor(5)},
    "backend": {"backend": "cpu", "deterministic": True, "validate": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_second_call_is_known_and_gives_the_same(options: dict[str, Any]) -> None:
    first = tilewise.attention(*tensors(), **options)
    assert known() == 1
    for _ in range(2):
        torch.testing.assert_close(tilewise.attention(*tensors(), **options), first, rtol=0, atol=0)
    assert known() == 1


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_of_a_known_call_are_the_same(options: dict[str, Any]) -> None:
    results = []
    for _ in range(3):
        inputs = tensors(grad=True)
        learned = {
            name: x.clone().requires_grad_()
            for name, x in options.items()
            if isinstance(x, torch.Tensor) and x.is_floating_point()
        }
        out = tilewise.attention(*inputs, **{**options, **learned})
        loss = sum(x.square().sum() for x in (out if isinstance(out, tuple) else (out,)))
        results.append(torch.autograd.grad(loss, [*inputs, *learned.values()]))
    assert known() == 1
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def packed(*lengths: int) -> tuple[Any, ...]:
    x = torch.randn(10, 2, 8, generator=torch.Generator().manual_seed(0))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return x, x, x, offsets, offsets


def test_lengths_are_read_in_every_call() -> None:
    def attend(*lengths: int) -> torch.Tensor:
        return tilewise.attention_varlen(*packed(*lengths), max_seqlen_q=7, max_seqlen_k=7, causal=True)

    results = [attend(3, 7), attend(7, 3), attend(3, 7)]
    assert known() == 1
    assert torch.equal(results[0], results[2]) and not torch.equal(results[0], results[1])
    with pytest.raises(ArgumentError, match="max_seqlen_q: got 7, but member 1 has 8 rows"):
        attend(2, 8)
    with pytest.raises(ArgumentError, match="non-decreasing"):
        attend(6, -2)


# Each beside a call of `tensors()` with the options before it, which is known.
WRONG: list[tuple[dict[str, Any], dict[str, Any], type[TilewiseError]]] = [
    ({"causal": True}, {"causal": 1}, ArgumentError),
    ({"deterministic": True}, {"deterministic": 1}, ArgumentError),
    ({"validate": False}, {"validate": 0}, ArgumentError),
    ({"softcap": 1.0}, {"softcap": True}, ArgumentError),
    ({"softmax_scale": 1}, {"softmax_scale": True}, ArgumentError),
    ({"dropout_p": 0.0}, {"dropout_p": False}, ArgumentError),
    ({"window": (1, 0)}, {"window": (True, 0)}, ArgumentError),
    ({"window": (1, 0)}, {"window": (1.0, 0)}, ArgumentError),
    ({}, {"dropout_seed": "7"}, ArgumentError),
    ({}, {"dropout_seed": True}, ArgumentError),
    ({}, {"backend": "abacus"}, ArgumentError),
    ({}, {"out_dtype": torch.float64}, DtypeError),
    ({"bias": modifier(4, 6, 8)}, {"bias": modifier(4, 6, 9)}, ShapeError),
    ({"bias": modifier(4, 6, 8)}, {"bias": modifier(4, 6, 8).long()}, DtypeError),
    ({"sinks": modifier(4)}, {"sinks": [0.1] * 4}, DtypeError),
]


@pytest.mark.parametrize("before, then, error", WRONG, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_what_is_refused_is_refused_beside_a_known_call(
    before: dict[str, Any], then: dict[str, Any], error: type[TilewiseError]
) -> None:
    for _ in range(2):
        tilewise.attention(*tensors(), **before)
    with pytest.raises(error):
        tilewise.attention(*tensors(), **{**before, **then})


def test_tensors_that_do_not_fit_are_refused_beside_a_known_call() -> None:
    q, k, v = tensors()
    for _ in range(2):
        tilewise.attention(q, k, v)
    for wrong in (
        (q, k.half(), v),
        (q, k[:1], v),
        (q[..., :4], k, v),
        (q[0], k[0], v[0]),
        (q.mT.contiguous().mT, k, v),
    ):
        with pytest.raises((DtypeError, ShapeError)):
            tilewise.attention(*wrong)
    with pytest.raises(tilewise.errors.DeviceError):
        tilewise.attention(q, k.to("meta"), v)
    for wrong in ((None, k, v), (q, [1.0], v), (q.to_sparse(), k, v), (q, k, v.numpy())):
        with pytest.raises(TilewiseError):
            tilewise.attention(*wrong)


def test_each_thing_that_matters_makes_another_key() -> None:
    q, k, v = tensors()
    strided = torch.stack([q, q], -2)[..., 0, :]
    calls: list[Callable[[], Any]] = [
        lambda: tilewise.attention(q, k, v),
        lambda: tilewise.attention(*tensors(7)),
        lambda: tilewise.attention(strided, k, v),
        lambda: tilewise.attention(q, k.expand(2, -1, -1, -1)[:1].expand(2, -1, -1, -1), v),
        lambda: tilewise.attention(*(x.double() for x in (q, k, v))),
        lambda: tilewise.attention(q.clone().requires_grad_(), k, v),
        lambda: tilewise.attention(q, k, v, bias=modifier(6, 8)),
        lambda: tilewise.attention(q, k, v, bias=modifier(1, 4, 6, 8)),
        lambda: tilewise.attention(q, k, v, sinks=modifier(4)),
        lambda: tilewise.attention(q, k, v, alibi_slopes=modifier(4)),
        lambda: tilewise.attention(q, k, v, alibi_slopes=modifier(2, 4)),
        *(lambda o=o: tilewise.attention(q, k, v, **o) for o in VALUES),
    ]
    for count, call in enumerate(calls, 1):
        call()
        assert known() == count


VALUES: list[dict[str, Any]] = [
    {"causal": True},
    {"causal": "bottom_right"},
    {"causal": "top_left"},
    {"window": (1, 0)},
    {"window": (0, 1)},
    {"mask": Window(1, 0)},
    {"mask": Window(1, 0) & Causal()},
    {"softcap": 2.0},
    {"softcap": 3.0},
    {"softmax_scale": 2.0},
    {"dropout_p": 0.5},
    {"return_lse": True},
    {"deterministic": True},
    {"out_dtype": torch.float32},
    {"backend": "cpu"},
    {"validate": True},
]


def test_gradient_modes_are_part_of_the_key() -> None:
    inputs = tensors(grad=True)
    for _ in range(3):
        assert tilewise.attention(*inputs).requires_grad
        with torch.no_grad():
            assert not tilewise.attention(*inputs).requires_grad
        with torch.inference_mode():
            assert tilewise.attention(*inputs).is_inference()
    assert not tilewise.attention(*(x.detach() for x in inputs)).is_inference()


def test_unpredictable_parts_stay_so() -> None:
    inputs = tensors()
    torch.manual_seed(3)
    drawn = [tilewise.attention(*inputs, dropout_p=0.5) for _ in range(3)]
    assert known() == 1
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[1], drawn[2])
    torch.manual_seed(3)
    assert torch.equal(tilewise.attention(*inputs, dropout_p=0.5), drawn[0])


class Seen(TorchDispatchMode):
    """Which of the package's operators ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Watching(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "dispatch": Seen,
    "function": Watching,
    "device": lambda: torch.device("cpu"),
    "tangents": forward_ad.dual_level,
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_what_watches_operators_sees_them(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    inputs = tensors()
    first, _ = (tilewise.attention(*inputs) for _ in range(2))
    with mode() as active:
        assert eager.find((*inputs, *(None,) * 7), (None,) * 12) == (None, None)
        assert torch.equal(tilewise.attention(*inputs), first)
    if isinstance(active, Seen):
        assert "tilewise.forward.default" in active.names


class Subclass(torch.Tensor):
    pass


def test_tensors_of_other_kinds_take_the_long_way() -> None:
    q, k, v = tensors()
    nothing = (None,) * 7
    options = (None,) * 12
    assert eager.find((q, k, v, *nothing), options)[0] is not None
    assert eager.find((torch.nn.Parameter(q), k, v, *nothing), options)[0] is not None
    escaped: list[torch.Tensor] = []
    torch.func.grad(lambda x: (escaped.append(x), x.sum())[1])(q)
    with FakeTensorMode():
        fake = torch.empty(2, 6, 4, 8)
    for other in (q.as_subclass(Subclass), fake, escaped[0]):
        assert eager.find((other, k, v, *nothing), options) == (None, None)
        assert eager.find((q, k, v, other, *nothing[1:]), options) == (None, None)
    first = tilewise.attention(q, k, v)
    assert torch.equal(tilewise.attention(q.as_subclass(Subclass), k, v).as_subclass(torch.Tensor), first)
    assert torch.equal(tilewise.attention(escaped[0], k, v), first)


@pytest.mark.parametrize(
    "option",
    [
        {"mask": Document.from_lengths([2, 4])},
        {"mask": Predicate(lambda b, h, q, k: q >= k)},
        {"mask": torch.ones(6, 6, dtype=torch.bool)},
        {"mask": Causal() | Window(1, 1)},
        {"score_mod": ScoreMod(lambda s, b, h, q, k: s * 2)},
    ],
    ids=["document", "predicate", "dense", "or", "score_mod"],
)
def test_options_that_hold_tensors_or_functions_are_not_remembered(option: dict[str, Any]) -> None:
    x = tensors()[0]
    for _ in range(2):
        tilewise.attention(x, x, x, **option)
    assert known() == 0


def test_windows_as_lists_are_served() -> None:
    expected = tilewise.attention(*tensors(), window=(2, 0))
    for _ in range(2):
        assert torch.equal(tilewise.attention(*tensors(), window=[2, 0]), expected)


# Forward mode loads parts of PyTorch that still use torch.jit.script.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_transforms_of_known_calls() -> None:
    q, k, v = tensors()
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    for _ in range(2):
        (expected,) = torch.autograd.grad(tilewise.attention(*inputs).square().sum(), inputs[0])
        tilewise.attention(q, k, v)
    got = torch.func.grad(lambda x: tilewise.attention(x, k, v).square().sum())(q)
    torch.testing.assert_close(got, expected)
    plain = tilewise.attention(q, k, v)
    mapped = torch.func.vmap(lambda x: tilewise.attention(x, k, v))(torch.stack([q, q]))
    torch.testing.assert_close(mapped, torch.stack([plain, plain]))
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="tangent"):
        tilewise.attention(forward_ad.make_dual(q, q), k, v)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_of_known_calls_are_guarded() -> None:
    def served() -> tuple[list[torch.Tensor], torch.Tensor]:
        inputs = [x * 1 for x in tensors(grad=True)]
        return inputs, tilewise.attention(*inputs)

    served()
    (q, *_), out = served()
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        torch.autograd.grad(dq.square().sum(), q)
    for changed in range(3):
        inputs, out = served()
        inputs[changed].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    (q, *_), out = served()
    with pytest.raises(RuntimeError, match="Batching rule not implemented for tilewise::backward"):
        torch.autograd.grad(out, q, torch.ones(3, *out.shape), is_grads_batched=True)
    with torch.autograd.graph.save_on_cpu():
        inputs, offloaded = served()
    others, out = served()
    pairs = zip(torch.autograd.grad(offloaded.sum(), inputs), torch.autograd.grad(out.sum(), others), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_autocast_of_a_known_call() -> None:
    inputs = tensors()
    plain = [tilewise.attention(*inputs, softcap=9.0) for _ in range(2)][1]
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            lowered = tilewise.attention(*inputs, softcap=9.0)
        assert lowered.dtype == torch.bfloat16
        assert torch.equal(lowered, tilewise.attention(*(x.bfloat16() for x in inputs), softcap=9.0))
        assert torch.equal(tilewise.attention(*inputs, softcap=9.0), plain)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_of_a_known_call_computes() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(q, k, v, causal=True)

    first, second = tensors(), [x.flip(1) for x in tensors()]
    for _ in range(2):
        attend(*first)
    traced = torch.jit.trace(attend, tuple(first), check_trace=False)
    assert "tilewise::forward" in str(traced.graph)
    torch.testing.assert_close(traced(*second), attend(*second))


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_no_tensor_is_kept(grad: bool) -> None:
    def serve() -> list[weakref.ref[torch.Tensor]]:
        held = [*tensors(grad=grad), modifier(4, 6, 8), modifier(4), modifier(4)]
        q, k, v, bias, slopes, sinks = held
        for _ in range(3):
            out = tilewise.attention(q, k, v, bias=bias, alibi_slopes=slopes, sinks=sinks, dropout_p=0.2)
            if grad:
                out.sum().backward()
        return [weakref.ref(x) for x in (*held, out)]

    references = serve()
    gc.collect()
    assert known() == 1
    assert all(reference() is None for reference in references)


def test_what_is_remembered_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "MOST", 4)
    for n in range(1, 12):
        tilewise.attention(*tensors(n))
        assert known() <= 4


def functions_entered(call: Callable[[], Any]) -> int:
    """How many Python functions a call enters."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count - 1


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_a_known_call_enters_few_functions(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = tensors(grad=grad)
    for _ in range(2):
        out, lse = (x.detach() for x in tilewise.attention(*inputs, causal=True, return_lse=True))
    (remembered,) = eager._calls.values()
    # What the backend does has its own test, and the CPU's takes many.
    monkeypatch.setattr(remembered, "forward", lambda tensors: (out.view_as(out), lse.view_as(lse)))
    assert functions_entered(lambda: tilewise.attention(*inputs, causal=True, return_lse=True)) <= FUNCTIONS


def test_calls_with_other_gradients_of_scores_are_others() -> None:
    """Backends differ in whether they make the gradient of ALiBi slopes, so a call with it is remembered by itself."""
    eager.forget()
    q = torch.randn(1, 5, 2, 8, requires_grad=True)
    for needed in (False, True, False):
        tilewise.attention(q, q, q, alibi_slopes=torch.ones(2, requires_grad=needed))
    assert sorted(call.problem.options.needs_scores_grad for call in eager._calls.values()) == [False, True]


def no_choice(problem: Any, pass_: str = "forward") -> str:
    raise AssertionError("a backend was chosen anew")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_operators_know_their_calls(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled programs call nothing but operators: these must not choose anew in every step."""

    def step() -> list[torch.Tensor]:
        inputs = tensors(grad=True)
        # Under a mode, eager calls take the way of compiled ones.
        with Watching():
            out = tilewise.attention(*inputs, **options)
            out = out[0] if isinstance(out, tuple) else out
            return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    first = step()
    step()
    assert known() == 0
    monkeypatch.setattr(dispatch, "choose", no_choice)
    assert all(torch.equal(a, b) for a, b in zip(first, step(), strict=True))


def test_operators_read_lengths_in_every_call() -> None:
    def attend(*lengths: int) -> torch.Tensor:
        with Watching():
            return tilewise.attention_varlen(*packed(*lengths), max_seqlen_q=7, max_seqlen_k=7, causal=True)

    results = [attend(3, 7), attend(7, 3), attend(3, 7)]
    assert torch.equal(results[0], results[2]) and not torch.equal(results[0], results[1])
    with pytest.raises(ArgumentError, match="max_seqlen_q: got 7, but member 1 has 8 rows"):
        attend(2, 8)


def test_operators_look_at_functions_and_tensors_of_options_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [
        {"score_mod": ScoreMod(lambda s, b, h, q, k: s * 0.5, lambda ds, s, b, h, q, k: ds * 0.5)},
        {"mask": torch.ones(6, 8, dtype=torch.bool).tril()},
        {"mask": Predicate(lambda b, h, q, k: k % 2 == 0)},
    ]
    for options in calls:
        with Watching():
            tilewise.attention(*tensors(), **options)
    assert not served._served


def test_the_operator_of_caches_knows_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    q, (k, v) = torch.randn(2, 1, 4, 8), torch.randn(2, 2, 9, 2, 8)

    def attend(used: int) -> torch.Tensor:
        with Watching():
            return tilewise.attention_with_kvcache(q, k, v, cache_seqlens=torch.tensor([used, 3]))

    first = attend(5)
    attend(5)
    monkeypatch.setattr(dispatch, "choose_cache", no_choice)
    assert torch.equal(attend(5), first) and not torch.equal(attend(6), first)
    with pytest.raises(ArgumentError, match="cache_seqlens"):
        attend(10)
