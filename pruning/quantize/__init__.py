"""The quantization schemes there are, as data that imports without torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Scheme:
    """One way to store weights in fewer bits: ``bits`` a weight, one scale per output channel."""

    name: str
    title: str
    bits: int
    summary: str


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme(
            name="int8",
            title="int8",
            bits=8,
            summary="each weight becomes a whole number from -127 to 127, with one scale per output channel",
        ),
    )
}
