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


def correlated_inputs(tokens: int, features: int, seed: int) -> Matrix:
    """Inputs (tokens, features) that share a few directions, with features of very different strength."""
    random = np.random.default_rng(seed)
    shared = random.standard_normal((tokens, max(2, features // 8))) @ random.standard_normal(
        (max(2, features // 8), features)
    )
    return (shared + 0.5 * random.standard_normal((tokens, features))) * np.exp(random.standard_normal(features))
