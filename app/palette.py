"""Colours, dashes and markers: one look for each method and quantization on every chart."""

from dataclasses import dataclass

from pruning.methods import METHODS
from pruning.quantize import SCHEMES
from pruning.recipe import QuantizeStep

# Okabe and Ito, "Color Universal Design" (2008). Black and yellow are left out because each vanishes on one of the
# grounds; purple, orange and sky blue are a little darker than theirs, so that they keep a contrast of 3:1 on the light
# one.
VERMILION, BLUE, GREEN, PURPLE, ORANGE, SKY = OKABE_ITO = (
    "#D55E00",
    "#0072B2",
    "#009E73",
    "#C2739F",
    "#BD8200",
    "#4794BF",
)
GREY = "#808080"
UNPRUNED = "none"


@dataclass(frozen=True)
class Look:
    """Colour and dash of a method's line, and what is drawn inside of its marks, empty for nothing.

    No two methods share colour and dash, nor colour and mark: neither lines nor single points are taken for another's.
    """

    colour: str
    dash: str
    mark: str = ""


# Kept by name, so that a method keeps its look whatever is registered before it. Methods of one family share a colour.
_LOOKS = {
    "magnitude": Look(VERMILION, "dot"),
    "magnitude-row": Look(VERMILION, "longdash", "x"),
    "magnitude-global": Look(VERMILION, "longdashdot", "cross"),
    "wanda": Look(BLUE, "solid"),
    "sparsegpt": Look(GREEN, "dash"),
    "admm": Look(PURPLE, "dashdot"),
    "random": Look(SKY, "dot"),
    "width": Look(ORANGE, "longdash"),
    "depth": Look(ORANGE, "solid", "x"),
}
# For methods that nobody gave a look yet.
_SPARE = (
    Look(PURPLE, "longdash", "x"),
    Look(SKY, "solid", "x"),
    Look(BLUE, "dash", "x"),
    Look(GREEN, "dot", "x"),
    Look(PURPLE, "dash", "cross"),
    Look(SKY, "longdash", "cross"),
    Look(BLUE, "longdashdot", "cross"),
    Look(GREEN, "solid", "cross"),
)
# By name as well: schemes of as many bits may differ in how they round, and in nothing else that is drawn.
_QUANTIZED_MARKERS = {
    "int8": "square",
    "int8-dynamic": "pentagon",
    "int4": "diamond",
    "gptq-int4": "diamond-tall",
    "joint-int4": "diamond-wide",
    "float8": "hexagon",
}
# Shapes that Plotly draws with a cross inside; the others have a dot, or a dot and no ground.
_CROSSED = ("circle", "square", "diamond")
_INSIDE = {"x": "-dot", "cross": "-open-dot"}
_HATCHES = {8: "/", 4: "x"}


def method_colour(method: str) -> str:
    """The colour of a pruning method; neutral grey for the unpruned model and for a method that is no more."""
    return _look(method).colour


def method_dash(method: str) -> str:
    """The dash of a method's line, so that lines differ without colour."""
    return _look(method).dash


def method_mark(method: str) -> str:
    """What is drawn inside of a method's marks, in the colour of their edge; empty for nothing."""
    return _look(method).mark


def marker(quantize: str, dtype: str, method: str = UNPRUNED) -> str:
    """Circle for 16-bit weights, open circle for 32-bit, square for int8, diamonds for int4; a method's mark inside."""
    symbol, suffix = "circle", ""
    if quantize in SCHEMES:
        symbol = _QUANTIZED_MARKERS.get(quantize, "octagon")
    elif dtype == "float32":
        suffix = "-open"
    mark = method_mark(method)
    if not mark:
        return symbol + suffix
    return f"{symbol}-{mark}{suffix}" if symbol in _CROSSED else symbol + _INSIDE[mark]


def quantization_hatch(quantize: str) -> str:
    """The hatch of a bar, empty for weights that are not quantized."""
    return _HATCHES.get(SCHEMES[quantize].bits, "x") if quantize in SCHEMES else ""


def scheme_title(quantize: str, group: float | None) -> str:
    """The name of a quantization, with the size of its groups where it is not the usual one; "" for none."""
    if quantize not in SCHEMES:
        return ""
    known = group is not None and group == group and SCHEMES[quantize].groups
    return str(QuantizeStep(scheme=quantize, group=int(group) if known and group else None))


def method_title(method: str) -> str:
    """The method's name as people write it; "Dense" for the unpruned model."""
    if method in METHODS:
        return METHODS[method].title
    return "Dense" if method == UNPRUNED else method


def method_rank(method: str) -> int:
    """Where a method stands in every list: the unpruned model first, then the methods as they are registered."""
    return _place(method) + 1 if method in METHODS else 0


def _look(method: str) -> Look:
    if method not in METHODS:
        return Look(GREY, "solid")
    if method in _LOOKS:
        return _LOOKS[method]
    new = [name for name in METHODS if name not in _LOOKS]
    return _SPARE[new.index(method) % len(_SPARE)]


def _place(method: str) -> int:
    return list(METHODS).index(method)
