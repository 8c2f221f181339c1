"""Masks: exact counts, really the lowest, whatever the ties and zeros."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pruning.mask import lowest, lowest_in_groups, lowest_per_row, removal_count, zeros_first
from pruning.methods import METHODS
from pruning.recipe import Pattern

sizes = st.integers(1, 12)
sparsities = st.floats(0, 0.95)


def random_weights(rows: int, columns: int, zeros: float, seed: int) -> torch.Tensor:
    """Weights of few different values, so that there are ties, with a share of zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(1, 6, (rows, columns), generator=generator).float()
    weight *= torch.randint(0, 2, (rows, columns), generator=generator) * 2 - 1
    weight[torch.rand(rows, columns, generator=generator) < zeros] = 0
    return weight


def nearest(sparsity: float, weights: int) -> int:
    return math.floor(sparsity * weights + 0.5)


@pytest.mark.parametrize(
    ("weights", "sparsity", "count"), [(10, 0.5, 5), (7, 0.5, 4), (7, 0.3, 2), (9, 0, 0), (3, 0.1, 0)]
)
def test_removal_count_is_the_nearest_whole_number(weights: int, sparsity: float, count: int) -> None:
    assert removal_count(weights, sparsity) == count


@given(rows=sizes, columns=sizes, share=st.floats(0, 1), seed=st.integers(0, 99))
def test_lowest_takes_exactly_the_count_and_the_lowest(rows: int, columns: int, share: float, seed: int) -> None:
    scores = random_weights(rows, columns, 0.2, seed).abs()
    count = nearest(share, scores.numel())
    mask = lowest(scores, count)
    assert int(mask.sum()) == count
    assert torch.equal(scores[mask].sort().values, scores.flatten().sort().values[:count])


def test_of_equals_the_first_are_taken() -> None:
    assert lowest(torch.ones(2, 3), 4).tolist() == [[True, True, True], [True, False, False]]


@given(rows=sizes, columns=sizes, sparsity=sparsities, seed=st.integers(0, 99))
def test_rows_share_the_count_evenly(rows: int, columns: int, sparsity: float, seed: int) -> None:
    scores = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) + 0.1
    mask = lowest_per_row(scores, sparsity)
    count = nearest(sparsity, rows * columns)
    assert int(mask.sum()) == count
    share = count // rows
    following = []
    for row in range(rows):
        taken = int(mask[row].sum())
        assert taken in (share, share + 1)
        ranked = scores[row].sort().values
        assert torch.equal(scores[row][mask[row]].sort().values, ranked[:taken])
        following.append((float(ranked[share]) if share < columns else math.inf, taken - share))
    one_more = sorted(following)[: count - share * rows]
    assert sum(extra for _, extra in one_more) == count - share * rows


@given(rows=sizes, columns=sizes, sparsity=sparsities, zeros=st.floats(0, 1), seed=st.integers(0, 99))
def test_zeros_that_are_there_count_as_removed(
    rows: int, columns: int, sparsity: float, zeros: float, seed: int
) -> None:
    weight = random_weights(rows, columns, zeros, seed)
    weight[0] = 0
    natural = int((weight == 0).sum())
    mask = lowest_per_row(zeros_first(weight.abs(), weight), sparsity)
    remaining = int(weight.masked_fill(mask, 0).count_nonzero())
    assert weight.numel() - remaining == max(nearest(sparsity, weight.numel()), natural)


@given(
    rows=sizes, groups=st.integers(1, 5), pattern=st.sampled_from(["2:4", "4:8", "1:3", "1:2"]), seed=st.integers(0, 99)
)
def test_every_group_loses_its_lowest(rows: int, groups: int, pattern: str, seed: int) -> None:
    chosen = Pattern.parse(pattern)
    scores = random_weights(rows, groups * chosen.group, 0.2, seed).abs()
    mask = lowest_in_groups(scores, chosen)
    removed = chosen.group - chosen.kept
    for row in range(rows):
        for start in range(0, scores.shape[1], chosen.group):
            group, taken = scores[row, start : start + chosen.group], mask[row, start : start + chosen.group]
            assert int(taken.sum()) == removed
            assert torch.equal(group[taken].sort().values, group.sort().values[:removed])


@settings(deadline=None)
@given(
    method=st.sampled_from(sorted(name for name, method in METHODS.items() if method.kind == "weights")),
    rows=sizes,
    columns=st.sampled_from([4, 8, 16, 136]),
    ask=st.one_of(sparsities, st.sampled_from(["2:4", "4:8"])),
    zeros=st.floats(0, 0.6),
    dead=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_every_method_removes_exactly_what_was_asked_stays_finite_and_keeps_its_mask_when_run_again(
    method: str, rows: int, columns: int, ask: float | str, zeros: float, dead: int, seed: int
) -> None:
    if isinstance(ask, str) and ask not in METHODS[method].patterns:
        ask = 0.5
    pattern = Pattern.parse(ask) if isinstance(ask, str) else None
    if pattern is not None and columns % pattern.group:
        columns = 8
    sparsity = pattern.sparsity if pattern is not None else float(ask)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    weight[torch.rand(rows, columns, generator=generator) < zeros] = 0
    inputs = torch.randn(3 * columns, columns, generator=generator)
    inputs[:, :dead] = 0
    gram = inputs.T @ inputs
    statistics = {"none": None, "norms": gram.diagonal().sqrt(), "gram": gram}[METHODS[method].statistics]
    drawn = {"generator": torch.Generator().manual_seed(seed)} if METHODS[method].seeded else {}
    pruned = METHODS[method].load()(weight, statistics, sparsity, pattern, **drawn)
    assert torch.isfinite(pruned).all()
    again = METHODS[method].load()(pruned, statistics, sparsity, pattern, **drawn)
    assert torch.equal(again == 0, pruned == 0)
    removed = int((pruned == 0).sum())
    if pattern is None:
        natural = int((weight == 0).sum())
        count = nearest(sparsity, weight.numel())
        # SparseGPT fills zeros beyond the count when it makes up for what it removed; nothing else may change them.
        assert removed == count if natural <= count else removed >= count
    else:
        kept = (pruned != 0).view(rows, -1, pattern.group).sum(dim=2)
        assert int(kept.max()) <= pattern.kept
        if zeros == 0:
            assert int(kept.min()) == pattern.kept
