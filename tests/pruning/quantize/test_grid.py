"""Scales and codes of groups against plain loops, and GPTQ against weight-by-weight optimal brain surgery."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pruning.methods import admm, sparsegpt
from pruning.methods.sparsegpt import round_columns
from pruning.quantize.grid import Grid, quantize_groups
from pruning.recipe import Pattern
from pruning.statistics import UnusableStatisticsError
from tests.pruning.methods import references

Matrix = references.Matrix


def layer(rows: int, columns: int, seed: int = 0) -> tuple[Matrix, Matrix]:
    weight = np.random.default_rng(seed).standard_normal((rows, columns))
    inputs = references.correlated_inputs(4 * columns, columns, seed + 1)
    return weight, inputs.T @ inputs


def weights_of(codes: Tensor, scale: Tensor) -> Matrix:
    rows, columns = codes.shape
    return (codes.double() * scale.double().repeat_interleave(columns // scale.shape[1], dim=1)).view(rows, -1).numpy()


def error(weight: Matrix, found: tuple[Tensor, Tensor], gram: Matrix) -> float:
    return references.output_error(weight, weights_of(*found), gram)


def joint(weight: Matrix, gram: Matrix, sparsity: float, group: int, method: str = "sparsegpt") -> Grid:
    grid = Grid(group, torch.float64)
    prune = sparsegpt.prune if method == "sparsegpt" else admm.prune
    returned = prune(torch.from_numpy(weight), torch.from_numpy(gram), sparsity, None, grid=grid)
    np.testing.assert_array_equal(returned.numpy(), weights_of(*grid.result()))
    return grid


@pytest.mark.parametrize("group", [32, 64, 128])
def test_nearest_codes_are_those_of_a_plain_loop(group: int) -> None:
    weight = np.random.default_rng(0).standard_normal((5, 128))
    weight[2] = 0
    weight[3, 40:] *= 1e-3
    weight[4, 7] = -30
    codes, scale = quantize_groups(torch.from_numpy(weight), group)
    for row in range(5):
        for start in range(0, 128, group):
            values = weight[row, start : start + group]
            expected = references.best_scale(values)
            assert float(scale[row, start // group]) == pytest.approx(expected, rel=1e-12)
            assert codes[row, start : start + group].tolist() == [
                references.code_of(float(value), expected) for value in values
            ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_nearest_for_the_scale_that_is_stored(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(16, 64).to(dtype)
    codes, scale = quantize_groups(weight, 32)
    assert (scale.dtype, codes.dtype) == (dtype, torch.int8)
    exact = weight.double() / scale.double().repeat_interleave(32, dim=1)
    assert torch.equal(codes, exact.float().round().clamp(-8, 7).to(torch.int8))


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=32, max_size=32),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@settings(max_examples=100, deadline=None)
def test_zeros_stay_and_every_number_is_finite(values: list[float], dtype: torch.dtype) -> None:
    weight = torch.tensor([values, [0.0] * 32]).to(dtype)
    codes, scale = quantize_groups(weight, 32)
    assert bool((torch.isfinite(scale) & (scale > 0)).all())
    assert not codes[weight == 0].any()
    assert bool(((codes >= -8) & (codes <= 7)).all())
    assert not codes[1].any()


@pytest.mark.parametrize("shape", [(6, 64), (4, 256)])
@pytest.mark.parametrize("group", [32, 64])
def test_gptq_is_optimal_brain_surgery_with_rounding(shape: tuple[int, int], group: int) -> None:
    weight, gram = layer(*shape)
    codes, scales, _ = references.rounded(weight, gram, group)
    grid = Grid(group, torch.float64)
    returned = round_columns(torch.from_numpy(weight), torch.from_numpy(gram), None, grid)
    found = grid.result()
    np.testing.assert_array_equal(found[0].numpy(), codes)
    np.testing.assert_allclose(found[1].numpy(), scales, rtol=1e-9)
    np.testing.assert_array_equal(returned.numpy(), weights_of(*found))


def test_gptq_holds_what_was_removed() -> None:
    weight, gram = layer(6, 128)
    removed = np.random.default_rng(3).random(weight.shape) < 0.5
    weight[removed] = 0
    codes, scales, _ = references.rounded(weight, gram, 32, removed=removed)
    grid = Grid(32, torch.float64)
    round_columns(torch.from_numpy(weight), torch.from_numpy(gram), torch.from_numpy(removed), grid)
    np.testing.assert_array_equal(grid.result()[0].numpy(), codes)
    np.testing.assert_allclose(grid.result()[1].numpy(), scales, rtol=1e-9)
    assert not codes[removed].any()


@pytest.mark.parametrize(("shape", "group"), [((6, 64), 32), ((4, 256), 64), ((4, 256), 128)])
def test_joint_sparsegpt_is_optimal_brain_surgery_with_rounding(shape: tuple[int, int], group: int) -> None:
    weight, gram = layer(*shape)
    codes, scales, gone = references.rounded(weight, gram, group, sparsity=0.5)
    found = joint(weight, gram, 0.5, group).result()
    np.testing.assert_array_equal(found[0].numpy(), codes)
    np.testing.assert_allclose(found[1].numpy(), scales, rtol=1e-9)
    assert int(gone.sum()) == weight.size // 2


@pytest.mark.parametrize("method", ["sparsegpt", "admm"])
@pytest.mark.parametrize("pattern", ["2:4", "4:8"])
def test_joint_keeps_the_pattern(method: str, pattern: str) -> None:
    weight, gram = layer(12, 128)
    chosen = Pattern.parse(pattern)
    grid = Grid(32, torch.float64)
    prune = sparsegpt.prune if method == "sparsegpt" else admm.prune
    prune(torch.from_numpy(weight), torch.from_numpy(gram), chosen.sparsity, chosen, grid=grid)
    codes = grid.result()[0]
    assert int((codes.view(12, -1, chosen.group) != 0).sum(dim=-1).max()) <= chosen.kept
    half = sparsegpt.prune(torch.from_numpy(weight), torch.from_numpy(gram), chosen.sparsity, chosen)
    nearest = quantize_groups(half, 32)
    assert error(weight, grid.result(), gram) < error(weight, nearest, gram)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("method", ["sparsegpt", "admm"])
def test_walking_beats_rounding_to_nearest(method: str, group: int) -> None:
    weight, gram = layer(48, 256)
    exact, statistic = torch.from_numpy(weight), torch.from_numpy(gram)
    grid = Grid(group, torch.float64)
    round_columns(exact, statistic, None, grid)
    assert error(weight, grid.result(), gram) < 0.8 * error(weight, quantize_groups(exact, group), gram)
    prune = sparsegpt.prune if method == "sparsegpt" else admm.prune
    pruned = prune(exact, statistic, 0.5, None)
    one_pass = joint(weight, gram, 0.5, group, method).result()
    assert error(weight, one_pass, gram) < error(weight, quantize_groups(pruned, group), gram)
    assert int((one_pass[0] == 0).sum()) >= weight.size // 2


def test_joint_admm_removes_what_admm_removes() -> None:
    weight, gram = layer(16, 64)
    removed = admm.prune(torch.from_numpy(weight), torch.from_numpy(gram), 0.5, None) == 0
    codes = joint(weight, gram, 0.5, 32, "admm").result()[0]
    assert not codes[removed].any()


def test_natural_zeros_stay_under_joint_admm_even_when_nothing_has_to_go() -> None:
    weight, gram = layer(8, 64)
    weight[:, :40] = 0
    codes = joint(weight, gram, 0.5, 32, "admm").result()[0]
    assert not codes[:, :40].any()


def test_what_is_not_positive_definite_is_refused() -> None:
    weight, _ = layer(4, 32)
    with pytest.raises(UnusableStatisticsError, match="not positive definite"):
        round_columns(torch.from_numpy(weight), -torch.eye(32, dtype=torch.float64), None, Grid(32, torch.float64))
