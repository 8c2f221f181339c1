"""int8 against float64 arithmetic, one weight and one token at a time where it can be."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pruning.quantize import int8
from pruning.quantize.int8 import FEW_TOKENS, Int8Linear, has_int8_kernel, quantize_rows
from tests.pruning.kernels.ways import never_own

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
EPSILON = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@pytest.fixture(autouse=True)
def _no_kernels_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    never_own(monkeypatch)


def _weight(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-2, 1, rows)[:, None]
    return (torch.randn(rows, columns, generator=generator) * scale).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_the_nearest_to_the_weights_under_the_stored_scale(dtype: torch.dtype) -> None:
    weight = _weight(7, 12, dtype)
    codes, scale = quantize_rows(weight)
    assert (codes.dtype, scale.dtype) == (torch.int8, dtype)
    for row in range(7):
        largest = max(abs(value) for value in weight[row].tolist())
        stored = scale[row].item()
        assert stored == pytest.approx(largest / 127, rel=EPSILON[dtype])
        for column in range(12):
            wanted = weight[row, column].item() / stored
            assert abs(codes[row, column].item() - max(-127.0, min(127.0, wanted))) <= 0.5 + 1e-4


def test_codes_by_hand() -> None:
    codes, scale = quantize_rows(torch.tensor([[127.0, -63.4, 0.4, 0.0], [0.0, 0.0, 0.0, 0.0]]))
    assert codes.tolist() == [[127, -63, 0, 0], [0, 0, 0, 0]]
    assert scale[0].item() == 1.0
    assert scale[1].item() > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zero_and_no_code_leaves_the_range(dtype: torch.dtype) -> None:
    weight = _weight(64, 96, dtype)
    weight[torch.rand(64, 96, generator=torch.Generator().manual_seed(1)) < 0.5] = 0
    codes, _ = quantize_rows(weight)
    assert bool((codes[weight == 0] == 0).all())
    assert codes.abs().amax(dim=1).tolist() == [127] * 64


def test_rows_too_small_for_a_scale_stay_finite() -> None:
    weight = torch.full((2, 4), 2.0**-24, dtype=torch.float16)
    layer = Int8Linear(*quantize_rows(weight))
    assert bool(torch.isfinite(layer.dequantized()).all())
    assert layer.dequantized().abs().max().item() <= 2.0**-24


def _reference(layer: Int8Linear, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The exact output, and the sum of magnitudes that rounding errors are proportional to; float64, by columns."""
    weight = layer.codes.double() * layer.scale.double()[:, None]
    flat = inputs.double().reshape(-1, layer.in_features)
    output, magnitude = torch.zeros(2, len(flat), layer.out_features, dtype=torch.float64)
    for column in range(layer.in_features):
        product = flat[:, column : column + 1] * weight[:, column]
        output += product
        magnitude += product.abs()
    if layer.bias is not None:
        output += layer.bias.double()
        magnitude += layer.bias.double().abs()
    shape = (*inputs.shape[:-1], layer.out_features)
    return output.view(shape), magnitude.view(shape)


def _layer(rows: int, columns: int, dtype: torch.dtype, bias: bool, device: str = "cpu") -> Int8Linear:
    codes, scale = quantize_rows(_weight(rows, columns, dtype, seed=rows + columns))
    values = torch.randn(rows, generator=torch.Generator().manual_seed(2)).to(dtype) if bias else None
    return Int8Linear(codes, scale, values).to(device)


def _check(rows: int, columns: int, tokens: int, dtype: torch.dtype, bias: bool, device: str) -> None:
    layer = _layer(rows, columns, dtype, bias, device)
    inputs = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens)).to(dtype).to(device)
    exact, magnitude = _reference(layer, inputs)
    error = (layer(inputs).double() - exact).abs()
    # The weights are rounded once, the sums may be in float32, the output and the bias are rounded once each.
    allowed = (1.5 * EPSILON[dtype] + columns * 2.0**-24) * magnitude
    assert bool((error <= allowed).all()), (error / allowed).max()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (33, 17), (8, 48), (1, 32), (5, 64), (64, 128), (35, 96)])
def test_the_layer_is_within_rounding_of_float64(shape: tuple[int, int], dtype: torch.dtype, bias: bool) -> None:
    for tokens in (1, 2, 3, 4, 7, FEW_TOKENS, FEW_TOKENS + 1, 32):
        _check(*shape, tokens, dtype, bias, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_the_layer_is_within_rounding_of_float64_on_the_gpu(dtype: torch.dtype) -> None:
    for rows, columns in ((3, 5), (33, 17), (64, 128), (576, 1536)):
        for tokens in (1, 4, FEW_TOKENS, FEW_TOKENS + 1):
            _check(rows, columns, tokens, dtype, True, "cuda")


def test_both_ways_are_taken_where_the_kernel_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    kernel = torch._weight_int8pack_mm
    monkeypatch.setattr(torch, "_weight_int8pack_mm", lambda *given: (calls.append(given[0].shape), kernel(*given))[1])
    monkeypatch.setattr(int8, "has_int8_kernel", lambda device, dtype, rows, columns: dtype == torch.bfloat16)
    layer = _layer(8, 32, torch.bfloat16, bias=True)
    layer(torch.randn(2, FEW_TOKENS // 2, 32).bfloat16())
    assert calls == [(FEW_TOKENS, 32)]
    layer(torch.randn(1, FEW_TOKENS + 1, 32).bfloat16())
    layer(torch.randn(0, 32).bfloat16())
    _layer(8, 32, torch.float32, bias=True)(torch.randn(1, 32))
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_leading_dimensions_are_kept_and_the_input_is_not_changed(dtype: torch.dtype) -> None:
    layer = _layer(6, 32, dtype, bias=True)
    inputs = torch.randn(2, 1, 3, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = inputs.clone()
    output = layer(inputs)
    assert output.shape == (2, 1, 3, 6)
    assert torch.equal(inputs, before)
    for first in range(2):
        for second in range(3):
            exact, magnitude = _reference(layer, inputs[first, 0, second])
            error = (output[first, 0, second].double() - exact.view(6)).abs()
            assert bool((error <= 2 * EPSILON[dtype] * magnitude.view(6)).all())
    apart = torch.stack([inputs, inputs], dim=-1)[..., 0]
    assert not apart.is_contiguous()
    torch.testing.assert_close(layer(apart), output, rtol=2 * EPSILON[dtype], atol=0.1 * EPSILON[dtype])
    assert layer(torch.empty(0, 32, dtype=dtype)).shape == (0, 6)
    assert layer(torch.ones(32, dtype=dtype)).shape == (6,)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tokens_equal_a_dense_layer_of_the_dequantized_weights(dtype: torch.dtype) -> None:
    layer = _layer(24, 40, dtype, bias=True)
    dense = nn.Linear(40, 24, dtype=dtype)
    for row in range(24):
        for column in range(40):
            product = layer.codes[row, column].item() * layer.scale[row].item()
            assert layer.dequantized()[row, column] == torch.tensor(product, dtype=torch.float64).to(dtype)
    with torch.no_grad():
        dense.weight.copy_(layer.dequantized())
        dense.bias.copy_(layer.bias)
    inputs = torch.randn(FEW_TOKENS + 1, 40).to(dtype)
    assert torch.equal(layer(inputs), dense(inputs))


def test_what_runs_is_said() -> None:
    layer = _layer(8, 32, torch.bfloat16, bias=False)
    kernel = has_int8_kernel("cpu", torch.bfloat16, 8, 32)
    assert ("aten int8 up to" in layer.runtime) == kernel
    assert copy.deepcopy(layer).float().runtime == "dequantized int8 to float32"
    assert layer.codes.dtype == torch.int8


def test_a_device_without_the_kernel_or_with_a_wrong_one_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*given: Tensor) -> Tensor:
        raise NotImplementedError

    for kernel in (absent, lambda inputs, codes, scale: torch.zeros(3, 40, dtype=torch.bfloat16)):
        has_int8_kernel.cache_clear()
        monkeypatch.setattr(torch, "_weight_int8pack_mm", kernel)
        assert not has_int8_kernel("cpu", torch.bfloat16, 8, 32)
    monkeypatch.undo()
    has_int8_kernel.cache_clear()
    assert not has_int8_kernel("cpu", torch.float32, 8, 32)
    assert not has_int8_kernel("cpu", torch.bfloat16, 8, 48)
    assert not has_int8_kernel("mps", torch.bfloat16, 8, 32)


def test_codes_and_scales_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="one scale per row"):
        Int8Linear(torch.zeros(3, 4, dtype=torch.int8), torch.ones(4))
    with pytest.raises(ValueError, match="int8"):
        Int8Linear(torch.zeros(3, 4), torch.ones(3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (33, 17), (64, 128), (35, 96)])
def test_dynamic_rounds_each_token_and_multiplies_whole_numbers(shape: tuple[int, int], dtype: torch.dtype) -> None:
    _check_dynamic(*shape, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dynamic_multiplies_whole_numbers_on_the_gpu(dtype: torch.dtype) -> None:
    for shape in ((3, 5), (64, 128), (576, 1536)):
        _check_dynamic(*shape, dtype, "cuda")


def _check_dynamic(rows: int, columns: int, dtype: torch.dtype, device: str) -> None:
    plain = _layer(rows, columns, dtype, bias=True, device=device)
    layer = Int8Linear(plain.codes, plain.scale, plain.bias, activations=True)
    for tokens in (1, 2, 19):
        inputs = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens)).to(dtype)
        inputs[0] *= 50
        output = layer(inputs.to(device)).cpu()
        for token in range(tokens):
            values = inputs[token].float().numpy()
            scale = np.abs(values).max() / np.float32(127)
            whole = [round(float(value / scale)) for value in values]
            for row in range(0, rows, 7):
                codes = layer.codes[row].tolist()
                total = sum(code * value for code, value in zip(codes, whole, strict=True))
                assert layer.bias is not None
                bias = layer.bias[row].item()
                product = total * float(scale) * layer.scale[row].item()
                # Products and sums are in float32, and the output is rounded once.
                allowed = EPSILON[dtype] * abs(product + bias) + 2.0**-21 * (abs(product) + abs(bias))
                assert abs(output[token, row].item() - (product + bias)) <= allowed


def test_dynamic_without_a_product_of_whole_numbers_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, scale = quantize_rows(_weight(8, 64, torch.float32))
    layer = Int8Linear(codes, scale, activations=True)
    inputs = torch.randn(5, 64)
    assert layer.runtime == "aten int8 × int8"
    fast = layer(inputs)
    monkeypatch.setattr(int8, "has_int8_product", lambda *given: False)
    assert torch.equal(layer(inputs), fast)
    assert layer.runtime == "dequantized int8 to float32, inputs rounded to int8"


def test_a_token_of_zeros_gives_the_bias() -> None:
    layer = Int8Linear(*quantize_rows(torch.randn(4, 32)), torch.arange(4.0), activations=True)
    assert layer(torch.zeros(1, 32)).tolist() == [[0.0, 1.0, 2.0, 3.0]]
    assert layer(torch.zeros(0, 32)).shape == (0, 4)
