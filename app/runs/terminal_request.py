"""What the options of the terminal ask for: one run, or a sweep where one of them lists several values."""

from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from app.runs.combinations import StatisticsChoice, against_storing, ways_to_store, with_statistics
from app.runs.plain import plainly
from app.runs.spec import RunSpec
from app.runs.sweep import NOTHING, SweepRequest, identified
from pruning.allocation import UNIFORM
from pruning.errors import InputError
from pruning.methods import METHODS
from pruning.recipe import Pattern, PruneStep, QuantizeStep, Recipe
from pruning.sources import input_widths, parse_reference


@dataclass(frozen=True)
class Asked:
    """The runs in their order, and whether they are a sweep; then ``left_out`` are combinations there are none of."""

    specs: list[RunSpec]
    sweep: bool = False
    left_out: list[str] = field(default_factory=list)


def asked_for(
    *,
    method: str,
    sparsity: str | None,
    pattern: str | None,
    quantize: str,
    group_size: str | None,
    allocation: str,
    statistics: StatisticsChoice | None,
    **protocol: Any,
) -> Asked:
    """What is asked for by options that may hold several values between commas; ``protocol`` are fields of RunSpec.

    One value each is one run, by default of sequential statistics; more are every combination beside the dense model.
    Raises InputError in one sentence.
    """
    methods, patterns = _listed("--method", method), _listed("--pattern", pattern)
    sparsities, allocations = _listed("--sparsity", sparsity), _listed("--allocation", allocation)
    schemes, sizes = _listed("--quantize", quantize), _sizes(group_size)
    try:
        if any(len(values) > 1 for values in (methods, sparsities, patterns, schemes, sizes, allocations)):
            fields = {
                "methods": methods,
                "sparsities": sparsities,
                "patterns": patterns,
                "allocations": allocations,
                "quantize": schemes,
                "groups": sizes,
                "statistics": statistics or "auto",
            }
            request = SweepRequest.model_validate({**fields, **protocol})
            return Asked(request.specs(), sweep=True, left_out=request.left_out())
        seed = protocol["calibration"].seed
        single = {
            name: values[0] if values else None
            for name, values in (("sparsity", sparsities), ("pattern", patterns), ("allocation", allocations))
        }
        (scheme,) = ways_to_store(schemes, sizes)
        recipe = _recipe(methods[0], scheme=scheme, seed=seed, **single)
        widths = input_widths(parse_reference(protocol["model"]))
        against = against_storing(recipe.prune, recipe.quantize, protocol.get("device", "auto"), widths)
        if against is not None:
            raise InputError(against)
        if statistics == "shared":
            (recipe,) = with_statistics([recipe], "shared")
        return Asked([identified(RunSpec.model_validate({**protocol, "recipe": recipe}))])
    except ValidationError as error:
        raise plainly(error) from error
    except ValueError as error:
        raise InputError(str(error)) from error


def _listed(option: str, text: str | None) -> list[str]:
    """The values between commas, each once."""
    if text is None:
        return []
    values = [value.strip() for value in text.split(",")]
    if not all(values):
        raise InputError(f"{option} {text!r} has an empty value: write values with commas between them, as in a,b")
    return list(dict.fromkeys(values))


def _sizes(text: str | None) -> list[int]:
    values = _listed("--group-size", text)
    if not all(value.isascii() and value.isdigit() for value in values):
        raise InputError(f"--group-size {text!r} is no whole number: write how many weights share a scale, as in 64")
    return [int(value) for value in values]


def _recipe(
    method: str,
    *,
    sparsity: str | None,
    pattern: str | None,
    scheme: QuantizeStep | None,
    allocation: str | None,
    seed: int,
) -> Recipe:
    if method == NOTHING:
        if pattern is not None or (sparsity is not None and sparsity.strip("0.") != ""):
            raise InputError("method none removes nothing: leave out --sparsity and --pattern, or choose a method")
        if allocation != UNIFORM:
            raise InputError("method none removes nothing: leave out --allocation, or choose a method")
        return Recipe(quantize=scheme)
    parsed = Pattern.parse(pattern) if pattern is not None else None
    share: str | float | None = sparsity
    if share is None:
        if parsed is None:
            raise InputError(f"say how much {method} should remove: --sparsity 0.5, or --pattern 2:4")
        share = parsed.sparsity
    fields = {"method": method, "sparsity": share, "pattern": parsed, "allocation": allocation}
    drawn = {"seed": seed} if method in METHODS and METHODS[method].seeded else {}
    return Recipe(prune=PruneStep.model_validate({**fields, **drawn}), quantize=scheme)
