"""Colours, dashes and markers: one look for each method and quantization on every chart."""

from pruning.methods import METHODS
from pruning.quantize import SCHEMES

# Okabe and Ito, "Color Universal Design" (2008), in an order that keeps a contrast of 3:1 on both grounds for the
# first three; black and yellow are left out because each vanishes on one of the grounds.
OKABE_ITO = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#808080"
UNPRUNED = "none"

_DASHES = ("dot", "solid", "dash", "dashdot", "longdash", "longdashdot")
_QUANTIZED_MARKERS = {8: "square", 4: "diamond"}
_HATCHES = {8: "/", 4: "x"}


def method_colour(method: str) -> str:
    """The colour of a pruning method; neutral grey for the unpruned model and for a method that is no more."""
    return OKABE_ITO[_place(method) % len(OKABE_ITO)] if method in METHODS else GREY


def method_dash(method: str) -> str:
    """The dash of a method's line, so that lines differ without colour."""
    return _DASHES[_place(method) % len(_DASHES)] if method in METHODS else "solid"


def quantization_marker(quantize: str, dtype: str) -> str:
    """Circle for 16-bit weights, open circle for 32-bit, square for int8, diamond for int4."""
    if quantize in SCHEMES:
        return _QUANTIZED_MARKERS.get(SCHEMES[quantize].bits, "hexagon")
    return "circle-open" if dtype == "float32" else "circle"


def quantization_hatch(quantize: str) -> str:
    """The hatch of a bar, empty for weights that are not quantized."""
    return _HATCHES.get(SCHEMES[quantize].bits, "x") if quantize in SCHEMES else ""


def method_title(method: str) -> str:
    """The method's name as people write it; "Dense" for the unpruned model."""
    if method in METHODS:
        return METHODS[method].title
    return "Dense" if method == UNPRUNED else method


def method_rank(method: str) -> int:
    """Where a method stands in every list: the unpruned model first, then the methods as they are registered."""
    return _place(method) + 1 if method in METHODS else 0


def _place(method: str) -> int:
    return list(METHODS).index(method)
