"""What pydantic found wrong with what was asked, in one plain sentence."""

from pydantic import ValidationError

from pruning.errors import InputError
from pruning.recipe import MAXIMUM_SPARSITY

_RANGES = {"sparsity": f"choose a share from 0 to {MAXIMUM_SPARSITY:g}, such as 0.5 for half of the weights"}


def plainly(error: ValidationError) -> InputError:
    """The first thing that is wrong, named, with what would be right."""
    first = error.errors(include_url=False)[0]
    field = next((str(part) for part in reversed(first["loc"]) if isinstance(part, str)), "the request")
    field = "sparsity" if field == "sparsities" else field
    if first["type"] == "value_error":
        return InputError(str(first["ctx"]["error"]))
    name, given = field.replace("_", " "), first.get("input")
    if field in _RANGES and not first["type"].endswith("_parsing"):
        return InputError(f"{name} {given} is out of range: {_RANGES[field]}")
    limits = first.get("ctx", {})
    if "ge" in limits:
        return InputError(f"{name} {given} is too small: the least is {limits['ge']:g}")
    if "expected" in limits:
        return InputError(f"{name} {given!r} is not known: choose {limits['expected'].replace(chr(39), '')}")
    if first["type"].startswith(("int_", "float_")):
        kind = "a whole number" if first["type"].startswith("int_") else "a number"
        return InputError(f"{name} {given!r} is not {kind}")
    if first["type"] == "extra_forbidden":
        return InputError(f"there is no setting called {name}")
    return InputError(f"{name} {given!r} cannot be used: {first['msg'][:1].lower()}{first['msg'][1:]}")
