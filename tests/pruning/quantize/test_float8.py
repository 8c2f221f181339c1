"""float8 layers against float64 arithmetic on the rounded numbers, bit by bit where it can be."""

import pytest
import torch
from torch import Tensor

from pruning.quantize.float8 import Float8Linear, quantize_rows_float8


def value_of(byte: int) -> float:
    """The number an E4M3 byte stands for: 1 sign, 4 exponent (bias 7) and 3 mantissa bits, no infinities."""
    sign, exponent, mantissa = -1 if byte & 0x80 else 1, byte >> 3 & 15, byte & 7
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


ALL = sorted({value_of(byte) for byte in range(256) if byte & 0x7F != 0x7F})


def nearest_error(value: float) -> float:
    return min(abs(value - number) for number in ALL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_the_nearest_numbers_there_are(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(5, 48) * torch.logspace(-3, 1, 5)[:, None]).to(dtype)
    codes, scale = quantize_rows_float8(weight)
    assert (codes.dtype, scale.dtype) == (torch.float8_e4m3fn, dtype)
    for row in range(5):
        for column in range(48):
            wanted = max(-448.0, min(448.0, weight[row, column].item() / scale[row].item()))
            found = value_of(int(codes.view(torch.uint8)[row, column]))
            assert abs(found - wanted) <= nearest_error(wanted) + 1e-6 * abs(wanted)


def test_zeros_stay_zero_and_have_no_sign() -> None:
    weight = torch.tensor([[1.0, 0.0, -0.0, -1e-9], [0.0, 0.0, 0.0, 0.0]])
    codes, scale = quantize_rows_float8(weight)
    assert codes.view(torch.uint8)[:, 1:].tolist() == [[0, 0, 0], [0, 0, 0]]
    assert bool((scale > 0).all())


def test_inputs_are_rounded_token_by_token_and_multiplied_exactly() -> None:
    torch.manual_seed(0)
    bias = torch.randn(6)
    layer = Float8Linear(*quantize_rows_float8(torch.randn(6, 32)), bias)
    inputs = torch.randn(2, 3, 32) * torch.tensor([1.0, 100.0, 0.0])[:, None]
    expected = torch.zeros(2, 3, 6, dtype=torch.float64)
    for first in range(2):
        for token in range(3):
            row = inputs[first, token]
            scale = row.abs().max() / 448
            rounded = (row / scale).to(torch.float8_e4m3fn).double() * scale.double() if scale > 0 else row.double()
            weight = layer.codes.double() * layer.scale.double()[:, None]
            expected[first, token] = weight @ rounded + bias.double()
    torch.testing.assert_close(layer(inputs).double(), expected, rtol=1e-5, atol=1e-4)
    assert layer.runtime == "dequantized float8 to float32, inputs rounded to float8"


def test_codes_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="codes must be float8_e4m3fn"):
        Float8Linear(torch.zeros(2, 4), torch.ones(2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_agrees_with_the_plain_way_on_the_gpu() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the card has no float8")
    torch.manual_seed(0)
    weight = torch.randn(128, 256).bfloat16()
    layer = Float8Linear(*quantize_rows_float8(weight))
    for tokens in (1, 5, 64):
        inputs = torch.randn(tokens, 256).bfloat16()
        plain: Tensor = layer.cpu()(inputs)
        fast = layer.cuda()(inputs.cuda()).cpu()
        assert layer.runtime == "aten float8 × float8"
        torch.testing.assert_close(fast.float(), plain.float(), rtol=2e-2, atol=2e-2)
