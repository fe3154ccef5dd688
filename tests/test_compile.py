"""torch.compile, torch.export, fake tensors: as in eager, without a graph break or a compilation for each length."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import tilewise
from tilewise import BlockMask, Causal, Document, Interval, Predicate, PrefixLM, ScoreMod, Window, interning
from tilewise.problem import Options

# Dynamo and AOTAutograd, which is where calls can go wrong; no code generation.
BACKEND = "aot_eager"

pytestmark = [
    # Dynamo's own ways with autograd functions, and parts of torch.func.
    pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=32):
        yield
    torch._dynamo.reset()


class Compiled:
    """A compiled function that counts its graphs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.counter = CompileCounterWithBackend(BACKEND)
        self.run = torch.compile(function, fullgraph=True, backend=self.counter)

    def __call__(self, *arguments: Any) -> Any:
        return self.run(*arguments)

    @property
    def graphs(self) -> int:
        return self.counter.frame_count


def randn(*shape: int, grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).requires_grad_(grad)


X = randn(1, 9, 2, 8)


def assert_same(got: Any, expected: Any) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, check_stride=True)


def check(compiled: Callable[..., Any], eager: Callable[..., Any], *arguments: Any) -> None:
    """Outputs and gradients of the two agree, strides included."""
    got, expected = compiled(*arguments), eager(*arguments)
    got, expected = (x if isinstance(x, tuple) else (x,) for x in (got, expected))
    assert_same(got, expected)
    inputs = [x for x in arguments if torch.is_tensor(x) and x.requires_grad]
    if inputs:
        grads = (torch.autograd.grad(sum(x.square().sum() for x in out), inputs) for out in (got, expected))
        assert_same(*grads)


def test_lengths_share_a_graph() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return tilewise.attention(q, k, v, causal=True, window=(3, 0), softcap=3.0, return_lse=True)

    compiled = Compiled(attend)
    for n in (5, 6, 9, 12, 1, 1, 7):
        check(compiled, attend, *(randn(2, m, h, 8, grad=True) for m, h in ((n, 4), (n + 3, 2), (n + 3, 2))))
    # One for the first length, one for all lengths, one for the single query.
    assert compiled.graphs <= 3


def test_inference_lengths_share_a_graph() -> None:
    compiled = Compiled(lambda q, k: tilewise.attention(q, k, k, causal=True))
    for n in (17, 18, 33, 40):
        check(compiled, lambda q, k: tilewise.attention(q, k, k, causal=True), randn(2, 1, 4, 8), randn(2, n, 2, 8))
    assert compiled.graphs <= 2


def test_one_tensor_three_times() -> None:
    def attend(x: torch.Tensor, slopes: torch.Tensor) -> Any:
        return tilewise.attention(x, x, x, causal=True, alibi_slopes=slopes, sinks=slopes)

    compiled = Compiled(attend)
    for n in (1, 4, 6):
        check(compiled, attend, randn(2, n, 2, 8, grad=True), randn(2, grad=True))


def test_every_differentiable_argument() -> None:
    def attend(q: Any, k: Any, v: Any, bias: Any, slopes: Any, sinks: Any) -> Any:
        return tilewise.attention(q, k, v, bias=bias, alibi_slopes=slopes, sinks=sinks, softcap=9.0, return_lse=True)

    shapes = ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6), (4, 5, 7), (2, 4), (4,))
    check(Compiled(attend), attend, *(randn(*shape, grad=True) for shape in shapes))


def test_packed_sequences_share_a_graph() -> None:
    def attend(x: torch.Tensor, offsets: torch.Tensor, longest: int) -> Any:
        return tilewise.attention_varlen(
            x, x, x, offsets, offsets, max_seqlen_q=longest, max_seqlen_k=longest, causal=True, return_lse=True
        )

    compiled = Compiled(attend)
    for lengths in ([3, 7], [0, 5, 5], [10, 3], [1] * 10, [8, 8, 2]):
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        check(compiled, attend, randn(sum(lengths), 2, 8, grad=True), offsets, max(lengths))
    assert compiled.graphs <= 3


@pytest.mark.parametrize("return_lse", [False, True])
def test_the_backward_gets_a_gradient_of_the_lse_only_where_it_is_returned(return_lse: bool) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compiled = torch.compile(tilewise.attention, fullgraph=True, backend=backend)
    x = X.clone().requires_grad_()
    out = compiled(x, x, x, return_lse=return_lse)
    sum(y.sum() for y in (out if return_lse else (out,))).backward()
    (call,) = (node for node in graphs[1].graph.nodes if node.target is torch.ops.tilewise.backward.default)
    assert (call.args[3] is not None) == return_lse


def test_merged_states() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        parts = [tilewise.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 3), slice(3, None))]
        return tilewise.merge_states(*parts[0], *parts[1])

    check(Compiled(attend), attend, *(randn(2, 7, 2, d, grad=True) for d in (8, 8, 6)))


def below(c: Any) -> Callable[..., Any]:
    return lambda b, h, q, k: q - k < c


def by_default(c: Any) -> Callable[..., Any]:
    def near(b: Any, h: Any, q: Any, k: Any, c: Any = c) -> Any:
        return q - k < c

    return near


def by_keyword(c: Any) -> Callable[..., Any]:
    def near(b: Any, h: Any, q: Any, k: Any, *, c: Any = c) -> Any:
        return q - k < c

    return near


def by_helper(c: Any) -> Callable[..., Any]:
    def small(distance: Any) -> Any:
        return distance < c

    return lambda b, h, q, k: small(q - k)


def by_list(c: Any) -> Callable[..., Any]:
    bound = [c]
    return lambda b, h, q, k: q - k < bound[0]


def by_pair(c: Any) -> Callable[..., Any]:
    bound = (c, 0)
    return lambda b, h, q, k: q - k < bound[0]


class Near:
    def __init__(self, c: Any) -> None:
        self.c = c

    def method(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return q - k < self.c

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return q - k < self.c


def by_object(c: Any) -> Callable[..., Any]:
    near = Near(c)
    return lambda b, h, q, k: q - k < near.c


def by_method(c: Any) -> Callable[..., Any]:
    return Near(c).method


# What PyTorch 2.11 cannot trace: lists in functions, and what is called without being a function.
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)
CAPTURES_OF_NEWER = (by_list, Near, by_method)
CAPTURES = (below, by_default, by_keyword, by_helper, by_pair, by_object, *CAPTURES_OF_NEWER)


def visible_within(c: int) -> torch.Tensor:
    return tilewise.attention(X, X, X, window=(c - 1, None))


@pytest.mark.parametrize("make", CAPTURES, ids=lambda make: make.__name__.strip("<>"))
def test_functions_with_other_captured_values_are_other_masks(make: Callable[[int], Any]) -> None:
    """To the compiler two such functions look alike: they have the same code."""
    compiled = Compiled(lambda x, mask: tilewise.attention(x, x, x, mask=mask))
    if OLD and make in CAPTURES_OF_NEWER:
        # An error at once, and never the other function's mask.
        with pytest.raises(Exception, match=r"id\(\) with unsupported args|is not a constant"):
            compiled(X, make(1))
        return
    for c in (1, 4):
        expected = visible_within(c)
        torch.testing.assert_close(tilewise.attention(X, X, X, mask=make(c)), expected)
        torch.testing.assert_close(compiled(X, make(c)), expected)


def test_masks_from_outside() -> None:
    compiled = Compiled(lambda x, mask: tilewise.attention(x, x, x, mask=mask))
    ids = torch.tensor([0, 0, 1, 1, 1, 0, 2, 2, 2])
    masks = [
        *(Predicate(below(c)) & Causal() for c in (2, 4)),
        *(Window(c, 1) for c in (1, 2)),
        Causal("top_left"),
        *(Document(ids.roll(c)) for c in (0, 1)),
        *(Interval(lo=c * ids, hi=torch.arange(9) + c) for c in (0, 1)),
        *(PrefixLM(c) for c in (2, 3)),
        *(PrefixLM(torch.tensor([c])) for c in (2, 4)),
        *(BlockMask.longformer(9, block=2, global_blocks=n) for n in (0, 1)),
        Window(2, 0) | PrefixLM(3),
        *(torch.rand(9, 9, generator=torch.Generator().manual_seed(c)) < 0.5 for c in (0, 1)),
    ]
    for mask in masks:
        torch.testing.assert_close(compiled(X, mask), tilewise.attention(X, X, X, mask=mask))


def test_a_mask_that_is_replaced_on_a_module() -> None:
    class Attend(torch.nn.Module):
        def __init__(self, c: int) -> None:
            super().__init__()
            self.mask = Predicate(below(c))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return tilewise.attention(x, x, x, mask=self.mask)

    module = Attend(1)
    compiled = Compiled(module)
    for c in (1, 3, 6):
        module.mask = Predicate(below(c))
        torch.testing.assert_close(compiled(X), visible_within(c))


def test_masks_from_inside() -> None:
    calls: list[Callable[[torch.Tensor], Any]] = [
        lambda x: tilewise.attention(x, x, x, mask=lambda b, h, q, k: q - k < 3),
        lambda x: tilewise.attention(x, x, x, mask=Predicate(lambda b, h, q, k: q - k < 3) & Window(None, 2)),
        lambda x: tilewise.attention(x, x, x, mask=Causal() | PrefixLM(4), causal="bottom_right"),
    ]
    for call in calls:
        check(Compiled(call), call, X.clone().requires_grad_())


NUMBERS: dict[str, tuple[Callable[[torch.Tensor, Any], Any], tuple[float, ...]]] = {
    "window": (lambda x, c: tilewise.attention(x, x, x, window=(c, 0)), (0, 1, 3)),
    "prefix": (lambda x, c: tilewise.attention(x, x, x, mask=PrefixLM(c)), (0, 1, 3)),
    "aux": (lambda x, c: tilewise.attention(x, x, x, mask=Predicate(near_by, (c,))), (1, 3, 2.5)),
    "score_mod": (lambda x, c: tilewise.attention(x, x, x, score_mod=ScoreMod(times, dtimes, (c,))), (0.5, 2.0, 3.0)),
    "scale_and_cap": (lambda x, c: tilewise.attention(x, x, x, softmax_scale=c, softcap=2 * c), (0.5, 2.0, 3.0)),
    "dropout_p": (lambda x, c: tilewise.attention(x, x, x, dropout_p=c, dropout_seed=3), (0.5, 0.2, 0.3)),
    "dropout_seed": (lambda x, c: tilewise.attention(x, x, x, dropout_p=0.3, dropout_seed=c), (1, 5, 2**40)),
}


def near_by(b: Any, h: Any, q: Any, k: Any, c: Any) -> Any:
    return q - k < c


def times(s: Any, b: Any, h: Any, q: Any, k: Any, c: Any) -> Any:
    return s * c + (q - k) * 0.1


def dtimes(ds: Any, s: Any, b: Any, h: Any, q: Any, k: Any, c: Any) -> Any:
    return ds * c


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_change(name: str) -> None:
    call, values = NUMBERS[name]
    compiled = Compiled(call)
    for value in values:
        check(compiled, call, X, value)


def test_tensors_that_change_do_not_recompile() -> None:
    def attend(x: torch.Tensor, seed: torch.Tensor, ids: torch.Tensor, c: torch.Tensor) -> Any:
        mod = ScoreMod(times, dtimes, (c,))
        return tilewise.attention(x, x, x, mask=Document(ids), score_mod=mod, dropout_p=0.2, dropout_seed=seed)

    compiled = Compiled(attend)
    for i in range(3):
        x = X.clone().requires_grad_()
        check(compiled, attend, x, torch.tensor(i), (torch.arange(9) * (i + 1)) // 5, torch.tensor(0.5 * i))
    assert compiled.graphs == 1


def test_checkpoints_replay_drawn_dropout() -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: tilewise.attention(x * 1, x, x, dropout_p=0.5), x, use_reentrant=False)

    compiled = Compiled(attend)
    results = []
    for function in (attend, compiled):
        torch.manual_seed(3)
        x = X.clone().requires_grad_()
        out = function(x)
        out.square().sum().backward()
        results.append((out, x.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_drawn_dropout_follows_the_generator() -> None:
    def attend(x: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(x, x, x, dropout_p=0.3)

    compiled = Compiled(attend)
    results = []
    for function in (compiled, attend, compiled):
        torch.manual_seed(1)
        results.append(function(X))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert not torch.equal(compiled(X), results[0])


@pytest.mark.parametrize(
    "transform", [torch.func.grad, torch.func.vmap, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))]
)
def test_transforms_inside_a_compiled_function_are_refused(transform: Callable[..., Any]) -> None:
    compiled = Compiled(lambda x: transform(lambda y: tilewise.attention(y, y, y).square().sum())(x))
    with pytest.raises(Exception, match=r"a torch\.func transform .* inside torch\.compile"):
        compiled(X[None] if transform is torch.func.vmap else X)


def test_a_varying_number_in_an_inline_function_is_never_the_old_one() -> None:
    compiled = Compiled(lambda x, c: tilewise.attention(x, x, x, mask=lambda b, h, q, k: q - k < c))
    if OLD:
        with pytest.raises(Exception, match="__closure__"):
            compiled(X, 2)
        return
    torch.testing.assert_close(compiled(X, 2), visible_within(2))
    # It has no name that the compiler could watch; aux=(c,) does.
    with pytest.raises(Exception, match="closure cell"):
        compiled(X, 4)


class Module(torch.nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        scale = q.shape[-1] ** -0.5
        return tilewise.attention(q, k, v, causal=True, window=(3, 0), softmax_scale=scale, return_lse=True)


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_dynamic_length(strict: bool) -> None:
    length = torch.export.Dim("length", min=2, max=100)
    sample = tuple(randn(2, 5, 2, 8) for _ in range(3))
    program = torch.export.export(Module(), sample, dynamic_shapes=({1: length},) * 3, strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    inputs = tuple(randn(2, 11, 2, 8) for _ in range(3))
    for exported in (program, torch.export.load(file)):
        assert_same(exported.module()(*inputs), Module()(*inputs))


def test_export_of_packed_sequences() -> None:
    class Packed(torch.nn.Module):
        def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> Any:
            n = x.shape[0]
            return tilewise.attention_varlen(x, x, x, offsets, offsets, max_seqlen_q=n, max_seqlen_k=n, causal=True)

    total = torch.export.Dim("total", min=2, max=100)
    sample = (randn(10, 2, 8), torch.tensor([0, 3, 10]))
    program = torch.export.export(Packed(), sample, dynamic_shapes=({0: total}, None))
    inputs = (randn(12, 2, 8), torch.tensor([0, 5, 12]))
    torch.testing.assert_close(program.module()(*inputs), Packed()(*inputs))


def test_a_saved_graph_does_not_take_another_function_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Near3(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return tilewise.attention(x, x, x, mask=lambda b, h, q, k: q - k < 3)

    module = torch.export.export(Near3(), (X,)).module()
    torch.testing.assert_close(module(X), visible_within(3))
    # Another process: other functions were seen there, in another order.
    monkeypatch.setattr(interning, "_functions", {})
    monkeypatch.setattr(interning, "_numbers", {})
    for c in range(5):
        interning.intern(below(c))
    with pytest.raises(tilewise.errors.ArgumentError, match="saved graph"):
        module(X)


def operands(packed: bool, dtype: torch.dtype) -> tuple[Any, ...]:
    q, k, v = ((10, 4, 8), (12, 2, 8), (12, 2, 6)) if packed else ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6))
    offsets = (torch.tensor([0, 4, 10]), torch.tensor([0, 5, 12])) if packed else (None, None)
    extras: list[torch.Tensor] = []
    spec = Options(mask=Causal() & Window(4, 1), needs_grad=True).encode(extras)
    # Heads before rows in memory: results are contiguous all the same.
    tensors = [randn(*shape).to(dtype).transpose(-2, -3).contiguous().transpose(-2, -3) for shape in (q, k, v)]
    return (*tensors, None, randn(4), randn(4), None, *offsets, None, extras, spec, 7, 7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_fake_results_look_like_real_ones(packed: bool, dtype: torch.dtype) -> None:
    arguments = operands(packed, dtype)
    needs = "q k v alibi_slopes sinks"

    def run(*tensors: Any) -> list[torch.Tensor]:
        out, lse = torch.ops.tilewise.forward(*tensors)
        return [out, lse, *torch.ops.tilewise.backward(out, lse, torch.ones_like(out), None, needs, *tensors)]

    with FakeTensorMode() as mode:
        shaped = [mode.from_tensor(x) if torch.is_tensor(x) else x for x in arguments]
        fake = run(*shaped)
    for a, b in zip(run(*arguments), fake, strict=True):
        assert (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)
