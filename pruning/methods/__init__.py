"""The pruning methods there are and what each can do, as data that imports without torch."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

Statistics = Literal["none", "norms", "gram"]
Kind = Literal["weights", "width", "depth"]


@dataclass(frozen=True)
class Method:
    """Capabilities of one pruning method.

    ``statistics`` is what it must know of a layer's inputs: nothing, the norm of each input feature, or the
    Gram matrix XᵀX. ``patterns`` are the N:M patterns it offers beside unstructured sparsity. ``kind`` is what it
    removes: single weights, the width of blocks, or whole blocks. ``seeded`` methods draw random numbers, and their
    function takes a ``generator``. Those of ``scope`` "model" spread a sparsity over all layers themselves; for others
    ``allocations`` are the ways there are. ``cost`` says in words what its time goes by. ``shared_up_to`` is the
    sparsity, without a pattern, up to which statistics of the dense model were measured to cost nothing worth naming;
    None where they never were.
    """

    name: str
    title: str
    statistics: Statistics
    patterns: tuple[str, ...]
    summary: str
    paper: str
    cost: str
    kind: Kind = "weights"
    seeded: bool = False
    scope: Literal["layer", "model"] = "layer"
    allocations: tuple[str, ...] = ("uniform", "owl", "sensitivity")
    shared_up_to: float | None = None

    @property
    def needs_calibration(self) -> bool:
        """Whether the method looks at calibration text."""
        return self.statistics != "none"

    def load(self) -> "Callable[..., Tensor]":
        """The function that prunes one weight matrix; importing it imports torch."""
        function: Callable[..., Any] = import_module(f"pruning.methods.{self.name.replace('-', '_')}").prune
        return function


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            name="magnitude",
            title="Magnitude",
            statistics="none",
            patterns=("2:4", "4:8"),
            summary="removes the smallest weights of each layer, without looking at any text",
            paper="Han et al. 2015, Learning both Weights and Connections (arXiv 1506.02626)",
            cost="reads the weights once and no text",
        ),
        Method(
            name="magnitude-row",
            title="Magnitude by row",
            statistics="none",
            patterns=(),
            summary="removes the smallest weights of each output of a layer, without looking at any text",
            paper="the grouping of Sun et al. 2023 (arXiv 2306.11695, section 3) with magnitude alone",
            cost="reads the weights once and no text",
        ),
        Method(
            name="magnitude-global",
            title="Magnitude, one threshold",
            statistics="none",
            patterns=(),
            summary="removes the smallest weights of the whole model, whatever layer they are in",
            paper="Blalock et al. 2020, What is the State of Neural Network Pruning? (arXiv 2003.03033)",
            cost="reads the weights five times and no text",
            scope="model",
            allocations=(),
        ),
        Method(
            name="random",
            title="Random",
            statistics="none",
            patterns=("2:4", "4:8"),
            summary="removes weights by chance, a control that every other method should beat",
            paper="the control of Frankle and Carbin 2019 (arXiv 1803.03635)",
            cost="reads the weights once and no text",
            seeded=True,
        ),
        Method(
            name="wanda",
            title="Wanda",
            statistics="norms",
            patterns=("2:4", "4:8"),
            summary="removes the weights that matter least once multiplied by how strong their input is",
            paper="Sun et al. 2023, A Simple and Effective Pruning Approach for LLMs (arXiv 2306.11695)",
            cost="two passes over the calibration text",
            shared_up_to=0.7,
        ),
        Method(
            name="sparsegpt",
            title="SparseGPT",
            statistics="gram",
            patterns=("2:4", "4:8"),
            summary="removes weights one column at a time and adjusts the kept ones to make up for it",
            paper="Frantar and Alistarh 2023, SparseGPT (arXiv 2301.00774)",
            cost="two passes over the calibration text, and one solve a layer",
            shared_up_to=0.3,
        ),
        Method(
            name="admm",
            title="ADMM",
            statistics="gram",
            patterns=("2:4", "4:8"),
            summary="looks for the mask and the kept weights together, step by step, until both stay",
            paper="Boža 2024, Fast and Effective Weight Update for Pruned LLMs (arXiv 2401.02938)",
            cost="two passes over the calibration text, and twenty products of a layer with its Gram matrix",
            shared_up_to=0.5,
        ),
        Method(
            name="width",
            title="Width",
            statistics="gram",
            patterns=(),
            summary="removes FFN channels and groups of attention heads: a narrower model, faster everywhere",
            paper="Kurtic et al. 2023, ZipLM (arXiv 2302.04089), and Ling et al. 2024, SlimGPT (arXiv 2412.18110)",
            cost="two or three passes over the calibration text, and one solve a block",
            kind="width",
            allocations=("uniform",),
        ),
        Method(
            name="depth",
            title="Depth",
            statistics="norms",  # it looks at text, if only at what whole blocks change
            patterns=(),
            summary="removes the blocks that change their input least: a shorter model, faster everywhere",
            paper="Men et al. 2024, ShortGPT (arXiv 2403.03853)",
            cost="one pass over the calibration text for every block that goes",
            kind="depth",
            allocations=("uniform",),
        ),
    )
}
