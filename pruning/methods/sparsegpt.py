"""SparseGPT: remove weights column by column, the kept ones make up for it (Frantar and Alistarh 2023, 2301.00774)."""

from collections.abc import Callable

import torch
from torch import Tensor

from pruning.mask import FIRST, lowest, lowest_in_groups, removal_count
from pruning.methods.factor import Memory, dampened_cholesky
from pruning.methods.precision import working_copy
from pruning.quantize.grid import Grid
from pruning.recipe import Pattern
from pruning.statistics import UnusableStatisticsError

BLOCK = 128
"""Columns whose mask is chosen together and whose errors reach later columns in one product (section 3.3)."""

STEP = 32
"""Columns whose errors reach the rest of the block in one product; it only changes the speed."""

TRIANGLE = 192
"""Size from which on a triangle is inverted in parts; it only changes the speed."""

DAMPING = 0.01
"""Share of the mean diagonal added to the Gram matrix; ten times more at every retry."""

_memory = Memory()


def prune(
    weight: Tensor, statistics: Tensor | None, sparsity: float, pattern: Pattern | None, *, grid: Grid | None = None
) -> Tensor:
    """A copy of ``weight`` (out, in) with exactly the whole number nearest ``sparsity`` × out × in removed.

    ``statistics`` is the Gram matrix XᵀX (in, in) of the layer's inputs. The kept weights are changed so that the
    layer's outputs on those inputs change least. With ``pattern``, every M consecutive inputs lose all but N, chosen
    once the columns before them are done. With ``grid`` kept weights are rounded to it in the same pass, and what is
    returned are the rounded ones. Float64 stays, anything else becomes float32. Raises ValueError without statistics
    and UnusableStatisticsError when the Gram matrix is not positive definite however much it is dampened.
    """
    if statistics is None:
        raise ValueError("SparseGPT needs the Gram matrix of the inputs")
    if pattern is None and grid is None and removal_count(weight.numel(), sparsity) == 0:
        return working_copy(weight)
    # Columns are worked on one at a time, so they are what lies contiguous in memory: (in, out) from here on.
    columns = working_copy(weight.T)
    factor = _memory.get(statistics, inverse_factor, columns)
    dead = statistics.to(columns).diagonal() == 0
    if grid is not None:
        grid.begin(columns)
    if pattern is None:
        budget = _Budget(columns, sparsity)

        def choose(start: int, end: int) -> Tensor:
            scores = _scores(columns[start:end], factor.diagonal()[start:end, None], dead[start:end])
            return lowest(scores, budget.take(start, end))

        removed = _walk_in_blocks(columns, factor, choose, grid)
    else:
        removed = _remove_in_groups(columns, factor, dead, pattern, grid)
    _check_finite(columns)
    if grid is None and int(columns.count_nonzero()) + int(removed.count_nonzero()) < columns.numel():
        # Among millions of weights, an update hits zero exactly now and then; a kept weight stays one that is not zero.
        columns.masked_fill_((columns == 0) & ~removed & (weight.T != 0), torch.finfo(columns.dtype).tiny)
    return columns.T.contiguous()


def inverse_factor(gram: Tensor) -> Tensor:
    """The upper Cholesky factor U of the inverse of the dampened Gram matrix H, H⁻¹ = UᵀU.

    H = RRᵀ with R upper triangular is an ordinary Cholesky decomposition read from the last row and column to the
    first, and U = R⁻¹, so that H⁻¹ itself is never formed. An input that was always zero gets 1 more on the diagonal.
    Raises UnusableStatisticsError when no damping makes H positive definite.
    """
    diagonal = gram.diagonal()
    backwards = gram.flip(0, 1)
    backwards.diagonal().add_((diagonal == 0).flip(0))
    lower, _ = dampened_cholesky(backwards, DAMPING, diagonal.mean())
    del backwards, _
    factor = inverse_triangle(lower).flip(0, 1)
    if not bool(torch.isfinite(factor.sum())):
        raise UnusableStatisticsError("the inverse of the Gram matrix is not finite")
    return factor


def inverse_triangle(lower: Tensor) -> Tensor:
    """The inverse of a lower triangular matrix: a third of the work of solving for the identity, mostly in products."""
    size = lower.shape[0]
    if size <= TRIANGLE:
        identity = torch.eye(size, dtype=lower.dtype, device=lower.device)
        solved: Tensor = torch.linalg.solve_triangular(lower, identity, upper=False)
        return solved
    half = size // 2
    inverse = torch.zeros_like(lower)
    inverse[:half, :half] = inverse_triangle(lower[:half, :half])
    inverse[half:, half:] = inverse_triangle(lower[half:, half:])
    torch.mm(inverse[half:, half:] @ lower[half:, :half], inverse[:half, :half].neg(), out=inverse[half:, :half])
    return inverse


def _scores(columns: Tensor, diagonal: Tensor, dead: Tensor) -> Tensor:
    """What removing each weight costs, w²/[H⁻¹]_cc of the inputs not yet passed (equation 5)."""
    scores = (columns / diagonal).square_()
    # Weights on a dead input are free, but those that are zero already go before them, as they stay zero anyway.
    return scores.masked_fill_(dead[:, None], FIRST).masked_fill_(columns == 0, 2 * FIRST)


def round_columns(weight: Tensor, statistics: Tensor, removed: Tensor | None, grid: Grid) -> Tensor:
    """``weight`` (out, in) rounded to ``grid`` column by column, later columns making up for it (GPTQ).

    ``statistics`` is the Gram matrix (in, in) of the layer's inputs; what is ``removed`` (out, in) becomes zero.
    Raises UnusableStatisticsError as :func:`prune` does.
    """
    columns = working_copy(weight.T)
    factor = _memory.get(statistics, inverse_factor, columns)
    grid.begin(columns)
    gone = removed.T.contiguous() if removed is not None else torch.zeros_like(columns, dtype=torch.bool)
    _walk_in_blocks(columns, factor, lambda start, end: gone[start:end], grid)
    _check_finite(columns)
    return columns.T.contiguous()


def _check_finite(columns: Tensor) -> None:
    if not bool(torch.isfinite(columns.sum())):
        raise UnusableStatisticsError("the update of the kept weights is not finite")


def _walk_in_blocks(columns: Tensor, factor: Tensor, choose: Callable[[int, int], Tensor], grid: Grid | None) -> Tensor:
    """Remove what ``choose`` says for each block of columns when it is come to, and round the rest to ``grid``.

    ``columns`` (in, out) are changed in place; the mask (in, out) of what was removed comes back.
    """
    inputs = columns.shape[0]
    removed = torch.zeros_like(columns, dtype=torch.bool)
    for start in range(0, inputs, BLOCK):
        end = min(start + BLOCK, inputs)
        block = columns[start:end]
        diagonal = factor.diagonal()[start:end, None]
        mask = choose(start, end)
        removed[start:end] = mask
        errors = torch.empty_like(block)
        # Taken apart once, as it is the calls that cost; each column first takes what those before it in its step left.
        weights, failures, gone = block.unbind(), errors.unbind(), mask.unbind()
        inverse = (mask / diagonal if grid is None else 1 / diagonal).unbind()
        within = factor[start:end, start:end].T.contiguous()
        for low in range(0, end - start, STEP):
            high = min(low + STEP, end - start)
            if grid is not None and low % grid.group == 0:
                rows = slice(low, low + grid.group)
                grid.enter(start + low, _pruned(block[rows], mask[rows], factor[start + low :, start + low :]))
            for column in range(low, high):
                if column > low:
                    weights[column].addmv_(errors[low:column].T, within[column, low:column], alpha=-1)
                if grid is None:
                    torch.mul(weights[column], inverse[column], out=failures[column])
                else:
                    settled = grid.settle(start + column, weights[column], gone[column])
                    torch.mul(weights[column] - settled, inverse[column], out=failures[column])
                    weights[column].copy_(settled)
            block[high:].addmm_(within[high:, low:high], errors[low:high], alpha=-1)
        if grid is None:
            block.masked_fill_(mask, 0)
        columns[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    return removed


def _pruned(group: Tensor, mask: Tensor, factor: Tensor) -> Tensor:
    """What the ``group`` (inputs, out) becomes when what ``mask`` says is removed and nothing is rounded.

    ``factor`` begins at its first input. Its kept weights make up for those removed before them, and grow by it, so
    scales taken from them as they are would cut them off.
    """
    if not bool(mask.any()):
        return group
    group = group.clone()
    for column in range(len(group)):
        error = group[column] * mask[column] / factor[column, column]
        group[column + 1 :].addr_(factor[column, column + 1 : len(group)], error, alpha=-1)
    return group.masked_fill_(mask, 0)


class _Budget:
    """How many weights each block of columns may remove, so that the whole matrix comes out right.

    Blocks get their share by rounding what was due so far. Zeros that are there already count as removed wherever
    they are, so a block has at least its own and leaves enough for those of later blocks.
    """

    def __init__(self, columns: Tensor, sparsity: float) -> None:
        self.outputs = columns.shape[1]
        self.sparsity = sparsity
        self.columns = columns
        self.total = removal_count(columns.numel(), sparsity)
        self.removed = 0
        self.zeros = (columns == 0).sum(dim=1).tolist() if bool((columns == 0).any()) else [0] * columns.shape[0]

    def take(self, start: int, end: int) -> int:
        due = removal_count(end * self.outputs, self.sparsity) - self.removed
        most = self.total - self.removed - sum(self.zeros[end:])
        count = max(min(due, most), sum(self.zeros[start:end]))
        count = min(count, (end - start) * self.outputs)
        self.removed += count
        return count


def _remove_in_groups(columns: Tensor, factor: Tensor, dead: Tensor, pattern: Pattern, grid: Grid | None) -> Tensor:
    inputs = columns.shape[0]
    removed = torch.zeros_like(columns, dtype=torch.bool)
    size = pattern.group * max(1, BLOCK // pattern.group)

    def choose(low: int, high: int) -> Tensor:
        scores = _scores(columns[low:high], factor.diagonal()[low:high, None], dead[low:high])
        return lowest_in_groups(scores.T, pattern).T

    for start in range(0, inputs, size):
        end = min(start + size, inputs)
        errors = torch.empty_like(columns[start:end])
        for low in range(start, end, pattern.group):
            high = low + pattern.group
            group = columns[low:high]
            if grid is not None and low % grid.group == 0:
                # Which of its weights will go is not known yet: the scales are for those that would go now.
                whole = slice(low, low + grid.group)
                grid.enter(low, _pruned(columns[whole], choose(whole.start, whole.stop), factor[low:, low:]))
            mask = choose(low, high)
            removed[low:high] = mask
            diagonal = factor.diagonal()[low:high, None]
            inverse = (mask if grid is None else torch.ones_like(mask)) / diagonal
            for column in range(low, high):
                error = errors[column - start]
                if grid is None:
                    torch.mul(columns[column], inverse[column - low], out=error)
                else:
                    settled = grid.settle(column, columns[column], mask[column - low])
                    torch.mul(columns[column] - settled, inverse[column - low], out=error)
                    columns[column] = settled
                if column + 1 < high:
                    columns[column + 1 : high].addr_(factor[column, column + 1 : high], error, alpha=-1)
            if grid is None:
                group.masked_fill_(mask, 0)
            if high < end:
                columns[high:end].addmm_(factor[low:high, high:end].T, errors[low - start : high - start], alpha=-1)
        columns[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    return removed
