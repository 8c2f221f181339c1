"""The ways to spread one sparsity over the layers of a model, as data that imports without torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Allocation:
    """One way to spread a sparsity: every layer the same, or more where it hurts less, under the same total."""

    name: str
    title: str
    summary: str
    paper: str | None = None


UNIFORM = "uniform"

ALLOCATIONS: dict[str, Allocation] = {
    allocation.name: allocation
    for allocation in (
        Allocation(name=UNIFORM, title="Uniform", summary="every layer loses the same share"),
        Allocation(
            name="owl",
            title="OWL",
            summary="blocks with more outliers among their weights times inputs lose less",
            paper="Yin et al. 2023, Outlier Weighed Layerwise Sparsity (arXiv 2310.05175)",
        ),
        Allocation(
            name="sensitivity",
            title="Sensitivity",
            summary="layers whose pruning was measured to change the model's output more lose less",
        ),
    )
}
