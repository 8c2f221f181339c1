"""Wanda and SparseGPT once more, as plain loops over the equations of the papers, to compare with."""

import math

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def nearest(share: float, weights: int) -> int:
    """The whole number nearest share × weights."""
    return math.floor(share * weights + 0.5)


def wanda(weight: Matrix, inputs: Matrix, sparsity: float) -> Matrix:
    """Algorithm 1 of Wanda: rows lose their floor, and those with the lowest next score one more."""
    rows, columns = weight.shape
    norms = [math.sqrt(sum(float(x) ** 2 for x in inputs[:, column])) for column in range(columns)]
    pruned = weight.copy()
    following = []
    for row in range(rows):
        ranked = sorted((abs(float(weight[row, column])) * norms[column], column) for column in range(columns))
        share = math.floor(sparsity * columns)
        for _, column in ranked[:share]:
            pruned[row, column] = 0
        following.append((ranked[share][0], row, ranked[share][1]))
    missing = nearest(sparsity, rows * columns) - rows * math.floor(sparsity * columns)
    for _, row, column in sorted(following)[:missing]:
        pruned[row, column] = 0
    return pruned


def wanda_groups(weight: Matrix, inputs: Matrix, kept: int, group: int) -> Matrix:
    """N:M of Wanda, group by group."""
    norms = [math.sqrt(sum(float(x) ** 2 for x in inputs[:, column])) for column in range(weight.shape[1])]
    pruned = weight.copy()
    for row in range(weight.shape[0]):
        for start in range(0, weight.shape[1], group):
            ranked = sorted((abs(float(weight[row, c])) * norms[c], c) for c in range(start, start + group))
            for _, column in ranked[: group - kept]:
                pruned[row, column] = 0
    return pruned


def eliminations(gram: Matrix, damping: float = 0.01) -> list[Matrix]:
    """H⁻¹ of the inputs not yet passed, for every column: one step of Gaussian elimination after the other.

    Equation 4 of the paper. No Cholesky decomposition: the inverse is formed and its first row eliminated.
    """
    hessian = gram + damping * np.mean(np.diag(gram)) * np.eye(len(gram))
    for column in np.flatnonzero(np.diag(gram) == 0):
        hessian[column, column] += 1
    inverse = np.linalg.inv(hessian)
    steps = []
    while len(inverse):
        steps.append(inverse)
        inverse = (inverse - np.outer(inverse[:, 0], inverse[0]) / inverse[0, 0])[1:, 1:]
    return steps


def sparsegpt(weight: Matrix, gram: Matrix, sparsity: float, block: int = 128, damping: float = 0.01) -> Matrix:
    """SparseGPT as optimal brain surgery: weight by weight, each removal made up for by later weights of its row."""
    rows, columns = weight.shape
    inverses = eliminations(gram, damping)
    pruned = weight.copy()
    for start in range(0, columns, block):
        end = min(start + block, columns)
        count = nearest(sparsity, rows * end) - nearest(sparsity, rows * start)
        ranked = sorted(
            (float(pruned[row, column]) ** 2 / float(inverses[column][0, 0]), row, column)
            for row in range(rows)
            for column in range(start, end)
        )
        _remove(pruned, inverses, [(row, column) for _, row, column in ranked[:count]])
    return pruned


def sparsegpt_groups(weight: Matrix, gram: Matrix, kept: int, group: int) -> Matrix:
    """N:M of SparseGPT: the mask of a group is chosen when the columns before it are done (section 3.3)."""
    rows, columns = weight.shape
    inverses = eliminations(gram)
    pruned = weight.copy()
    for start in range(0, columns, group):
        chosen = []
        for row in range(rows):
            ranked = sorted(
                (float(pruned[row, column]) ** 2 / float(inverses[column][0, 0]), column)
                for column in range(start, start + group)
            )
            chosen += [(row, column) for _, column in ranked[: group - kept]]
        _remove(pruned, inverses, chosen)
    return pruned


def _remove(pruned: Matrix, inverses: list[Matrix], places: list[tuple[int, int]]) -> None:
    """Equation 3, column by column: w −= w_q / [H⁻¹]_qq · H⁻¹_q."""
    for row, column in sorted(places, key=lambda place: place[1]):
        inverse = inverses[column]
        pruned[row, column:] -= pruned[row, column] / inverse[0, 0] * inverse[0]
        pruned[row, column] = 0


def best_scale(values: Matrix) -> float:
    """The scale for a group of 4-bit codes with the least squared error, of 7/7, 6.78/7, … of the largest over 7."""
    largest = max(abs(float(value)) for value in values)
    tried = []
    for step in range(11):
        scale = max(largest * (1 - step / 32) / 7, float(np.finfo(np.float64).tiny))
        tried.append((sum((code_of(float(v), scale) * scale - float(v)) ** 2 for v in values), step, scale))
    return min(tried)[2]


def code_of(value: float, scale: float) -> int:
    """The nearest 4-bit code, halves to even."""
    return max(-8, min(7, round(value / scale)))


def rounded(
    weight: Matrix,
    gram: Matrix,
    group: int,
    sparsity: float | None = None,
    removed: NDArray[np.bool_] | None = None,
    block: int = 128,
) -> tuple[Matrix, Matrix, NDArray[np.bool_]]:
    """GPTQ weight by weight, or SparseGPT with rounding (section 3.5): codes, scales and what was removed.

    A column's error, whether it was removed or rounded, is made up for by the later weights of its row. With
    ``sparsity`` the mask is chosen block by block; ``removed`` is one that was chosen before. A group's scale is the
    best for what its weights become when those are removed that will be.
    """
    rows, columns = weight.shape
    inverses = eliminations(gram)
    left = weight.copy()
    codes, scales = np.zeros_like(left), np.zeros((rows, columns // group))
    gone = removed.copy() if removed is not None else np.zeros(left.shape, dtype=bool)
    for column in range(columns):
        if sparsity is not None and column % block == 0:
            end = min(column + block, columns)
            count = nearest(sparsity, rows * end) - nearest(sparsity, rows * column)
            ranked = sorted(
                (float(left[row, c]) ** 2 / float(inverses[c][0, 0]), row, c)
                for row in range(rows)
                for c in range(column, end)
            )
            for _, row, c in ranked[:count]:
                gone[row, c] = True
        for row in range(rows):
            if column % group == 0:
                ahead, these = left.copy(), range(column, column + group)
                _remove(ahead, inverses, [(row, c) for c in these if gone[row, c]])
                scales[row, column // group] = best_scale(ahead[row, these])
            scale = scales[row, column // group]
            codes[row, column] = 0 if gone[row, column] else code_of(left[row, column], scale)
            inverse = inverses[column]
            error = left[row, column] - codes[row, column] * scale
            left[row, column:] -= error / inverse[0, 0] * inverse[0]
    return codes, scales, gone


def correlated_inputs(tokens: int, features: int, seed: int) -> Matrix:
    """Inputs (tokens, features) that share a few directions, with features of very different strength."""
    random = np.random.default_rng(seed)
    shared = random.standard_normal((tokens, max(2, features // 8))) @ random.standard_normal(
        (max(2, features // 8), features)
    )
    return (shared + 0.5 * random.standard_normal((tokens, features))) * np.exp(random.standard_normal(features))


def admm(
    weight: Matrix,
    gram: Matrix,
    sparsity: float,
    group: tuple[int, int] | None = None,
    penalty: float = 0.7,
    damping: float = 0.1,
    iterations: int = 20,
    ramp: int = 15,
) -> Matrix:
    """Algorithm 1 of Boža 2024 with gradual masks, then every row's kept weights by least squares.

    ``group`` is (kept, group): while the mask grows it is the lowest of what such groups would lose.
    """
    norms = np.sqrt(np.diag(gram))
    hessian = gram / np.outer(norms, norms) + damping * np.eye(len(gram))
    dense = weight * norms
    solve = np.linalg.inv(hessian + penalty * np.eye(len(gram)))
    current, dual = dense, np.zeros_like(dense)
    for iteration in range(1, iterations + 1):
        if iteration <= ramp:
            share = sparsity * (1 - (1 - min(iteration / ramp, 1)) ** 3)
            removed = _lowest(np.abs(current + dual), nearest(share, weight.size), group, iteration == ramp)
        sparse = np.where(removed, 0, current + dual)
        dual = dual + current - sparse
        current = (dense @ hessian + penalty * (sparse - dual)) @ solve
    return least_squares(dense, hessian, removed) / norms


def _lowest(scores: Matrix, count: int, group: tuple[int, int] | None, whole: bool) -> NDArray[np.bool_]:
    candidates = sorted((scores[r, c], r, c) for r in range(scores.shape[0]) for c in range(scores.shape[1]))
    if group is not None:
        kept, size = group
        candidates = sorted(
            entry
            for row in range(scores.shape[0])
            for start in range(0, scores.shape[1], size)
            for entry in sorted((scores[row, c], row, c) for c in range(start, start + size))[: size - kept]
        )
    chosen = np.zeros(scores.shape, dtype=bool)
    for _, row, column in candidates if group is not None and whole else candidates[:count]:
        chosen[row, column] = True
    return chosen


def least_squares(target: Matrix, hessian: Matrix, removed: NDArray[np.bool_]) -> Matrix:
    """For every row the z, zero where ``removed``, with the least (z − t)H(z − t)ᵀ: ‖Lᵀz − Lᵀt‖ for H = LLᵀ."""
    root = np.linalg.cholesky(hessian).T
    found = np.zeros_like(target)
    for row in range(len(target)):
        kept = np.flatnonzero(~removed[row])
        if len(kept):
            found[row, kept] = np.linalg.lstsq(root[:, kept], root @ target[row], rcond=None)[0]
    return found


def output_error(weight: Matrix, pruned: Matrix, gram: Matrix) -> float:
    """‖X(W − Ŵ)ᵀ‖² from XᵀX."""
    change = weight - pruned
    return float(np.sum((change @ gram) * change))
