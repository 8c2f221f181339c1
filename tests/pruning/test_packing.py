"""Packing keeps every bit, and drops nothing but zeros."""

import pytest
import torch

from pruning.packing import pack, same_bits, unpack


def test_the_mask_and_values_by_hand() -> None:
    tensor = torch.tensor([[0.0, 1.5, 0.0], [-2.0, 0.0, -0.0], [0.0, 0.0, 0.0], [3.0, 0.0, 0.0]])
    mask, values = pack(tensor)
    # Kept are the elements 1, 3, 5 and 9, the first eight in the first byte from its lowest bit on.
    assert mask.tolist() == [0b00101010, 0b00000010]
    assert values.tolist() == [1.5, -2.0, -0.0, 3.0]
    assert same_bits(unpack(mask, values, (4, 3)), tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_every_bit_comes_back(dtype: torch.dtype, share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = (torch.randn(13, 11, generator=generator) * 40).to(dtype)
    tensor[torch.rand(13, 11, generator=generator) < share] = 0
    if dtype.is_floating_point:
        tensor[0, :4] = torch.tensor([-0.0, float("nan"), float("inf"), torch.finfo(dtype).smallest_normal / 2])
    mask, values = pack(tensor)
    assert (mask.dtype, mask.numel(), values.dtype) == (torch.uint8, 18, dtype)
    assert same_bits(unpack(mask, values, (13, 11)), tensor)


def test_a_transposed_view_comes_back_in_its_own_order() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).T
    assert unpack(*pack(tensor), (3, 2)).tolist() == tensor.tolist()


def test_signed_zero_and_nan_are_told_apart_by_their_bits() -> None:
    zero, nan = torch.zeros(1), torch.tensor([float("nan")])
    assert not same_bits(zero, -zero)
    assert same_bits(nan, nan.clone())
    assert not same_bits(zero, zero.to(torch.bfloat16))
    assert not same_bits(torch.zeros(2, 1), torch.zeros(2))


def test_a_mask_that_does_not_count_its_values_is_refused() -> None:
    mask, values = pack(torch.tensor([0.0, 1.0, 2.0]))
    with pytest.raises(ValueError, match="2 bits set for 1 values"):
        unpack(mask, values[:1], (3,))
    with pytest.raises(ValueError, match="3 bits set for 2 values"):
        unpack(mask | 0b1, values, (3,))
    with pytest.raises(ValueError, match="bits set after its 3 elements"):
        unpack(torch.tensor([0b10000010], dtype=torch.uint8), values, (3,))
