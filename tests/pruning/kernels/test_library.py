"""Our own kernels against float64 arithmetic, on every instruction set of this CPU."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pruning.kernels import library
from pruning.kernels.library import FORMATS, PATHS, Kernels, Product, kernels, paths
from pruning.quantize.int4 import Int4Linear, pack4
from pruning.quantize.int8 import Int8Linear
from pruning.quantize.layer import FEW_TOKENS
from tests.pruning.kernels.ways import own_where_possible

EPSILON = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}

pytestmark = pytest.mark.skipif(kernels() is None, reason="no C compiler")


def on(path: str) -> Kernels:
    return Kernels(library._library(), path)


def drawn(rows: int, columns: int, group: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (rows, columns) that use every value there is, scales, and the exact weights in float64."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    low, high = (-128, 128) if group is None else (-8, 8)
    codes = torch.randint(low, high, (rows, columns), generator=generator, dtype=torch.int8)
    shape = (rows,) if group is None else (rows, columns // group)
    scale = torch.rand(shape, generator=generator).add_(0.1).to(dtype)
    spread = scale.double()[:, None] if group is None else scale.double().repeat_interleave(group, dim=1)
    return codes, scale, codes.double() * spread


def product_of(found: Kernels, codes: Tensor, scale: Tensor) -> Product:
    return found.int8(codes, scale) if scale.ndim == 1 else found.int4(pack4(codes), scale)


def check(path: str, rows: int, columns: int, tokens: int, group: int | None, dtype: torch.dtype) -> None:
    codes, scale, weight = drawn(rows, columns, group, dtype)
    inputs = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    output = product_of(on(path), codes, scale)(inputs)
    assert (output.dtype, output.shape) == (dtype, (tokens, rows))
    exact, magnitude = inputs.double() @ weight.T, inputs.double().abs() @ weight.abs().T
    # The sums are in float32, in whatever order, and the output is rounded once, to a step that is never smaller.
    step = (EPSILON[dtype] * exact.abs()).clamp(min=torch.finfo(dtype).smallest_normal * EPSILON[dtype])
    allowed = step / 2 + (columns + 4) * 2.0**-24 * magnitude
    assert bool(((output.double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("path", PATHS)
def test_products_are_those_of_float64(path: str, threads: int) -> None:
    if path not in paths():
        pytest.skip(f"this CPU has no {path}")
    before = torch.get_num_threads()

    @settings(max_examples=150, deadline=None)
    @given(
        rows=st.integers(1, 70),
        groups=st.integers(1, 5),
        half=st.integers(1, 70),
        tokens=st.integers(1, FEW_TOKENS + 3),
        dtype=st.sampled_from(list(FORMATS)),
        four=st.booleans(),
    )
    def of_any_shape(rows: int, groups: int, half: int, tokens: int, dtype: torch.dtype, four: bool) -> None:
        if four:
            check(path, rows, 2 * half * groups, tokens, 2 * half, dtype)
        else:
            check(path, rows, half * groups, tokens, None, dtype)

    torch.set_num_threads(threads)
    try:
        of_any_shape()
        for group in (None, 64):  # large enough to be shared out
            check(path, 576, 1536, 3, group, torch.float32)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("group", [None, 32])
def test_numbers_that_are_none_come_through_and_spread_no_further(group: int | None, dtype: torch.dtype) -> None:
    codes, scale, _ = drawn(9, 64, group, dtype)
    codes[codes == 0] = 1
    codes[4] = 0
    inputs = torch.ones(3, 64, dtype=dtype)
    inputs[1, 5], inputs[2, 63] = torch.inf, torch.nan
    for path in paths():
        output = product_of(on(path), codes, scale)(inputs)
        assert bool(torch.isfinite(output[0]).all())
        assert output[0, 4] == 0
        expected = codes[:, 5].to(dtype).sign() * torch.inf
        assert torch.equal(output[1, codes[:, 5] != 0], expected[codes[:, 5] != 0])
        assert bool(output[1, 4].isnan())  # as infinity times zero is
        assert bool(output[2].isnan().all())


def test_the_numbers_of_16_bits_are_read_and_rounded_as_torch_does() -> None:
    """Every float16 and bfloat16 there is, through a product with 1."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        inputs = every.view(dtype).reshape(-1, 1)
        for path in paths():
            same = on(path).int8(torch.ones(1, 1, dtype=torch.int8), torch.ones(1, dtype=dtype))(inputs)
            torch.testing.assert_close(same, inputs, rtol=0, atol=0, equal_nan=True)
            # Seven times a number is exact in float32, and rounds up, down and to even.
            seven = on(path).int8(torch.full((1, 1), 7, dtype=torch.int8), torch.ones(1, dtype=dtype))(inputs)
            torch.testing.assert_close(seven, (inputs.float() * 7).to(dtype), rtol=0, atol=0, equal_nan=True)


def test_what_does_not_fit_is_refused_before_c_is_entered() -> None:
    found = on(PATHS[0])
    codes, scale = torch.zeros(4, 64, dtype=torch.int8), torch.ones(4)
    packed, scales = torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 2)
    for refused in (
        lambda: found.int8(codes.short(), scale),
        lambda: found.int8(codes[0], scale),
        lambda: found.int8(codes[:, :0], scale),
        lambda: found.int8(codes, scale[:3]),
        lambda: found.int8(codes, scale.double()),
        lambda: found.int8(codes.t().contiguous().t(), scale),
        lambda: found.int4(packed.view(torch.int8), scales),
        lambda: found.int4(packed, scales[:3]),
        lambda: found.int4(packed, scales[:, :0]),
        lambda: found.int4(packed, torch.ones(4, 3)),
        lambda: found.int4(packed, torch.ones(4, 64)),  # a group of one: a byte would lie in two groups
        lambda: found.int4(packed, torch.ones(2, 4).t()),
    ):
        with pytest.raises(ValueError, match="the kernels take"):
            refused()
    product = found.int8(codes, scale)
    for inputs in (torch.ones(1, 63), torch.ones(1, 64).half(), torch.ones(64, 2).t(), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="the kernels take"):
            product(inputs)
    assert product(torch.ones(64)).shape == (4,)
    assert product(torch.ones(0, 64)).shape == (0, 4)
    assert found.int8(codes[:0], scale[:0])(torch.ones(2, 64)).shape == (2, 0)


@pytest.mark.parametrize("group", [None, 32])
def test_a_layer_runs_on_them_until_it_is_moved(group: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    own_where_possible(monkeypatch)
    found = kernels()
    assert found is not None
    codes, scale, weight = drawn(8, 64, group, torch.float32)
    bias = torch.arange(8.0)
    layer = Int8Linear(codes, scale, bias) if group is None else Int4Linear(pack4(codes), scale, bias)
    bits = 8 if group is None else 4
    assert layer.runtime == f"dequantized int{bits} to float32"
    layer.prepare()
    named = f"poda int{bits} ({found.path}) up to {FEW_TOKENS} tokens, dequantized to float32 above"
    assert layer.runtime == named
    calls: list[int] = []
    multiply = layer._product._multiply  # type: ignore[union-attr]  # prepared
    monkeypatch.setattr(layer._product, "_multiply", lambda *given: (calls.append(given[4]), multiply(*given))[1])
    inputs = torch.randn(2, FEW_TOKENS // 2, 64)
    exact = inputs.double() @ weight.T + bias.double()
    torch.testing.assert_close(layer(inputs).double(), exact, rtol=1e-5, atol=1e-3)
    apart = torch.stack([inputs, inputs], dim=-1)[..., 0]
    torch.testing.assert_close(layer(apart).double(), exact, rtol=1e-5, atol=1e-3)
    assert calls == [FEW_TOKENS, FEW_TOKENS]
    layer(torch.randn(1, FEW_TOKENS + 1, 64))
    layer(inputs.double().float().requires_grad_()).sum().backward()
    with torch.no_grad():
        layer(torch.randn(1, 64, requires_grad=True))
    assert calls == [FEW_TOKENS, FEW_TOKENS, 1]
    copied = copy.deepcopy(layer)
    assert copied.runtime == f"dequantized int{bits} to float32"
    assert torch.equal(copied.dequantized(), layer.dequantized())
    layer.double()
    assert layer.runtime == f"dequantized int{bits} to float64"
    torch.testing.assert_close(layer(inputs.double()), exact)
    layer.float()
    layer.prepare()
    assert layer.runtime == named


def test_what_a_cpu_computes_wrongly_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_is_right", lambda found: found.path == PATHS[0])
    assert kernels.__wrapped__().path == PATHS[0]
    monkeypatch.setattr(library, "_is_right", lambda found: False)
    assert kernels.__wrapped__() is None


def test_a_wrong_product_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found = on(PATHS[0])
    assert library._is_right(found)
    monkeypatch.setattr(found, "int4", lambda codes, scale: on(PATHS[0]).int4(codes, 2 * scale))
    assert not library._is_right(found)
