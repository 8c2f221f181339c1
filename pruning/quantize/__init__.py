"""The quantization schemes there are, and what each can be combined with, as data that imports without torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pruning.methods import METHODS, Statistics

Rounding = Literal["nearest", "gptq", "joint"]
Codes = Literal["int8", "int4", "float8"]


@dataclass(frozen=True)
class Scheme:
    """One way to store weights in fewer bits.

    ``codes`` is what a weight becomes, ``bits`` how many it takes. ``groups`` are the numbers of consecutive inputs
    that may share a scale, the usual one first; where there are none, each output channel has one scale.
    ``rounding`` is how the codes are chosen: each weight's nearest; "gptq", one column at a time, later columns making
    up for what rounding changed; or "joint", the same in one pass with the pruning. ``statistics`` is what that must
    know of a layer's inputs. ``activations`` says whether inputs are rounded too, as they come. ``methods`` names the
    only pruning methods that it follows, None where it follows any and none; ``devices`` the only kinds of device it
    runs on, None for all.
    """

    name: str
    title: str
    summary: str
    paper: str
    codes: Codes
    bits: int
    groups: tuple[int, ...] = ()
    rounding: Rounding = "nearest"
    activations: bool = False
    methods: tuple[str, ...] | None = None
    devices: tuple[str, ...] | None = None

    @property
    def statistics(self) -> Statistics:
        """What choosing the codes must know of a layer's inputs."""
        return "none" if self.rounding == "nearest" else "gram"


GROUPS = (64, 32, 128)

SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme(
            name="int8",
            title="int8",
            summary="each weight becomes a whole number from -127 to 127, with one scale per output channel",
            paper="Dettmers et al. 2022, LLM.int8() (arXiv 2208.07339), without its outliers",
            codes="int8",
            bits=8,
        ),
        Scheme(
            name="int8-dynamic",
            title="int8 dynamic",
            summary="int8 weights, and what each layer is given is rounded to int8 too, token by token",
            paper="Yao et al. 2022, ZeroQuant (arXiv 2206.01861)",
            codes="int8",
            bits=8,
            activations=True,
        ),
        Scheme(
            name="int4",
            title="int4",
            summary="each weight becomes a whole number from -8 to 7, and a group of inputs shares a scale",
            paper="Dettmers and Zettlemoyer 2023, The case for 4-bit precision (arXiv 2212.09720)",
            codes="int4",
            bits=4,
            groups=GROUPS,
        ),
        Scheme(
            name="gptq-int4",
            title="GPTQ int4",
            summary="int4, rounded column by column while later ones make up for it on calibration text",
            paper="Frantar et al. 2023, GPTQ (arXiv 2210.17323)",
            codes="int4",
            bits=4,
            groups=GROUPS,
            rounding="gptq",
        ),
        Scheme(
            name="joint-int4",
            title="joint int4",
            summary="int4 in one pass with the pruning: what is removed and what is rounded are made up for together",
            paper="Frantar and Alistarh 2023, SparseGPT (arXiv 2301.00774), section 3.5",
            codes="int4",
            bits=4,
            groups=GROUPS,
            rounding="joint",
            methods=("sparsegpt", "admm"),
        ),
        Scheme(
            name="float8",
            title="float8",
            summary="each weight becomes an 8-bit floating-point number, with one scale per output channel",
            paper="Micikevicius et al. 2022, FP8 Formats for Deep Learning (arXiv 2209.05433)",
            codes="float8",
            bits=8,
            activations=True,
            devices=("cuda",),
        ),
    )
}


def objection(
    scheme: Scheme, group: int | None, *, method: str | None, device: str | None = None, widths: Iterable[int] = ()
) -> str | None:
    """Why ``scheme`` with ``group`` cannot follow ``method`` here, in one sentence, or None where it can.

    ``method`` is None where nothing is pruned, ``device`` the kind of device where it is known, and ``widths`` are the
    inputs of the layers, as far as they are known.
    """
    if scheme.methods is not None and method not in scheme.methods:
        after = f"not {METHODS[method].title}" if method in METHODS else "and nothing is pruned here"
        titles = " or ".join(METHODS[name].title for name in scheme.methods)
        return f"{scheme.title} is one pass with {titles}, {after}: choose GPTQ int4, or prune by {titles}"
    if group is not None and not scheme.groups:
        return f"{scheme.title} has one scale per output channel: leave out the group size"
    if group is not None and group not in scheme.groups:
        return f"a group of {group} is not offered by {scheme.title}: choose {_either(sorted(scheme.groups))}"
    if scheme.devices is not None and device is not None and device not in scheme.devices:
        return f"{scheme.title} runs on {_either(scheme.devices)} only, not on {device}: choose int8"
    if group is not None:
        for width in widths:
            if width % group:
                return f"group {group} does not divide a width of {width} inputs: {lever(scheme, widths)}"
    return None


def lever(scheme: Scheme, widths: Iterable[int]) -> str:
    """What to choose for layers of ``widths`` inputs, of which a group does not divide one."""
    known = list(widths)
    fitting = [group for group in sorted(scheme.groups, reverse=True) if not any(width % group for width in known)]
    return f"choose a group of {_either(fitting)}" if fitting else "choose int8, which has no groups"


def _either(options: Iterable[object]) -> str:
    return " or ".join(map(str, options))
