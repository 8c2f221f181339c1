"""int4 layers: packing by hand, both kernels against float64 arithmetic, and what is kept once prepared."""

import copy

import pytest
import torch
from torch import Tensor

from pruning.quantize import int4
from pruning.quantize.grid import quantize_groups
from pruning.quantize.int4 import FEW_TOKENS, Int4Linear, has_int4_kernel, pack4, unpack4
from tests.pruning.kernels.ways import never_own

EPSILON = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
SHAPES = [(1, 32), (5, 64), (17, 128), (16, 64), (64, 128), (80, 96), (144, 256)]


@pytest.fixture(autouse=True)
def _no_kernels_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    never_own(monkeypatch)


def drawn(rows: int, columns: int, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + columns)
    codes = torch.randint(-8, 8, (rows, columns), generator=generator, dtype=torch.int8)
    scale = torch.rand(rows, columns // group, generator=generator).add_(0.1).to(dtype)
    return codes, scale


def layer_of(
    rows: int, columns: int, dtype: torch.dtype, *, group: int = 32, bias: bool = False, device: str = "cpu"
) -> Int4Linear:
    codes, scale = drawn(rows, columns, group, dtype)
    values = torch.randn(rows, generator=torch.Generator().manual_seed(2)).to(dtype) if bias else None
    layer = Int4Linear(pack4(codes), scale, values).to(device)
    layer.prepare()
    return layer


def test_two_codes_a_byte_by_hand() -> None:
    codes = torch.tensor([[0, 7, -8, -1], [1, 0, 3, -2]], dtype=torch.int8)
    packed = pack4(codes)
    assert packed.tolist() == [[0x70, 0xF8], [0x01, 0xE3]]
    assert torch.equal(unpack4(packed), codes)


def test_packing_a_transposed_matrix_is_packing_its_copy() -> None:
    codes = torch.randint(-8, 8, (6, 4), dtype=torch.int8).t()
    assert torch.equal(unpack4(pack4(codes)), codes)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_layer_is_within_rounding_of_float64(shape: tuple[int, int], dtype: torch.dtype, bias: bool) -> None:
    for tokens in (1, 2, 7, FEW_TOKENS, FEW_TOKENS + 1, 40):
        check(*shape, tokens, dtype, bias, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_layer_is_within_rounding_of_float64_on_the_gpu(dtype: torch.dtype) -> None:
    for rows, columns in ((16, 64), (17, 128), (576, 1536), (192, 576)):
        for tokens in (1, 4, FEW_TOKENS + 1, 200):
            check(rows, columns, tokens, dtype, True, "cuda")
    assert layer_of(576, 1536, torch.bfloat16, device="cuda").runtime == "aten int4"


def check(rows: int, columns: int, tokens: int, dtype: torch.dtype, bias: bool, device: str) -> None:
    layer = layer_of(rows, columns, dtype, bias=bias, device=device)
    codes, scale = drawn(rows, columns, 32, dtype)
    weight = codes.double() * scale.double().repeat_interleave(32, dim=1)
    inputs = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    exact = inputs.double() @ weight.T
    magnitude = inputs.double().abs() @ weight.abs().T
    if layer.bias is not None:
        exact, magnitude = exact + layer.bias.cpu().double(), magnitude + layer.bias.cpu().double().abs()
    error = (layer(inputs.to(device)).cpu().double() - exact).abs()
    # The weights are rounded once, the sums may be in float32, the output and the bias are rounded once each.
    allowed = (1.5 * EPSILON[dtype] + columns * 2.0**-24) * magnitude
    assert bool((error <= allowed).all()), (error / allowed).max()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_a_prepared_layer_holds_the_same_codes_in_the_same_bytes(shape: tuple[int, int], group: int) -> None:
    rows, columns = shape
    if columns % group:
        columns = group
    codes, scale = drawn(rows, columns, group, torch.bfloat16)
    layer = layer_of(rows, columns, torch.bfloat16, group=group)
    assert torch.equal(layer.whole_codes(), codes)
    assert torch.equal(layer.scale, scale)
    assert torch.equal(layer.dequantized(), Int4Linear(pack4(codes), scale).dequantized())
    assert layer.codes.nbytes == rows * columns // 2
    assert (layer.out_features, layer.in_features, layer.group) == (rows, columns, group)


def test_both_ways_are_taken_where_the_kernel_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_int4_kernel("cpu", torch.bfloat16, 64, 128, 64), "this torch has no int4 kernel for the CPU"
    calls = []
    multiply = int4._multiply
    monkeypatch.setattr(int4, "_multiply", lambda *given: (calls.append(given[0].shape), multiply(*given))[1])
    layer = layer_of(64, 128, torch.bfloat16, bias=True)
    layer(torch.randn(2, FEW_TOKENS // 2, 128).bfloat16())
    assert calls == [(FEW_TOKENS, 128)]
    layer(torch.randn(1, FEW_TOKENS + 1, 128).bfloat16())
    assert layer(torch.randn(0, 128).bfloat16()).shape == (0, 64)
    assert len(calls) == 1


def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    has_int4_kernel.cache_clear()
    multiply = int4._multiply
    monkeypatch.setattr(int4, "_multiply", lambda *given: multiply(*given) + 1)
    layer = layer_of(64, 128, torch.bfloat16)
    monkeypatch.undo()
    has_int4_kernel.cache_clear()
    assert layer.runtime == "dequantized int4 to bfloat16"


def test_another_order_of_the_kernel_is_not_taken_for_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    has_int4_kernel.cache_clear()
    order = int4._in_kernel_order
    monkeypatch.setattr(int4, "_out_of_cpu_order", lambda codes, *given: unpack4(codes))
    assert not has_int4_kernel("cpu", torch.bfloat16, 64, 128, 64)
    has_int4_kernel.cache_clear()
    assert order is int4._in_kernel_order


def test_what_runs_is_said() -> None:
    codes, scale = drawn(16, 64, 32, torch.bfloat16)
    layer = Int4Linear(pack4(codes), scale)
    assert layer.runtime == "dequantized int4 to bfloat16"
    layer.prepare()
    assert layer.runtime == f"aten int4 up to {FEW_TOKENS} tokens, dequantized to bfloat16 above"
    assert layer_of(17, 64, torch.bfloat16).runtime == "dequantized int4 to bfloat16"


def test_leading_dimensions_are_kept_and_the_input_is_not_changed() -> None:
    layer = layer_of(16, 32, torch.bfloat16, bias=True)
    inputs = torch.randn(2, 1, 3, 32).bfloat16()
    before = inputs.clone()
    output = layer(inputs)
    assert output.shape == (2, 1, 3, 16)
    assert torch.equal(inputs, before)
    assert torch.equal(layer(inputs.transpose(0, 2)), output.transpose(0, 2))


@pytest.mark.parametrize(
    ("codes", "scale"),
    [
        (torch.zeros(4, 16, dtype=torch.int8), torch.ones(4, 1)),
        (torch.zeros(4, 16, dtype=torch.uint8), torch.ones(4)),
        (torch.zeros(4, 16, dtype=torch.uint8), torch.ones(3, 1)),
        (torch.zeros(4, 16, dtype=torch.uint8), torch.ones(4, 3)),
    ],
)
def test_codes_and_scales_that_do_not_fit_are_refused(codes: Tensor, scale: Tensor) -> None:
    with pytest.raises(ValueError, match="codes must be uint8"):
        Int4Linear(codes, scale)


def test_a_quantized_layer_takes_the_bytes_it_says() -> None:
    weight = torch.randn(64, 128).bfloat16()
    codes, scale = quantize_groups(weight, 64)
    layer = Int4Linear(pack4(codes), scale)
    state = copy.deepcopy(layer.state_dict())
    assert {name: tensor.nbytes for name, tensor in state.items()} == {"codes": 64 * 64, "scale": 64 * 2 * 2}
