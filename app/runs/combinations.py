"""Every combination of what was asked, without those that no method has, and which statistics each is made from."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from pydantic import ValidationError

from app.runs.plain import plainly
from pruning.allocation import ALLOCATIONS, UNIFORM
from pruning.errors import InputError
from pruning.methods import METHODS
from pruning.quantize import SCHEMES, objection
from pruning.recipe import Pattern, PruneStep, QuantizeStep, Recipe

StatisticsChoice = Literal["auto", "sequential", "shared"]


@dataclass(frozen=True)
class Combined:
    """Pruning steps in the order asked for, and in words the combinations there are none of."""

    steps: list[PruneStep]
    left_out: list[str]


def combine(
    methods: Sequence[str], sparsities: Sequence[float], patterns: Sequence[str], allocations: Sequence[str], seed: int
) -> Combined:
    """Each method at each sparsity and pattern, under each allocation; ``seed`` is for those that draw numbers.

    A combination that a method does not have is left out where something else remains for that method. Raises
    InputError, in one sentence, where nothing does, and for what is out of range or unknown.
    """
    shares: list[tuple[float, Pattern | None]] = [(share, None) for share in sparsities]
    try:
        shares += [(pattern.sparsity, pattern) for pattern in map(Pattern.parse, patterns)]
        steps: list[PruneStep] = []
        left_out: dict[str, None] = {}
        for name in methods:
            made, missing = [], []
            for (share, pattern), allocation in product(shares, allocations):
                lacking = _lacking(name, pattern, allocation)
                if lacking is not None:
                    missing.append((lacking, share, pattern, allocation))
                else:
                    made.append(_step(name, share, pattern, allocation, seed))
            if missing and not made:
                _, share, pattern, allocation = missing[0]
                _step(name, share, pattern, allocation, seed)
                raise AssertionError(f"{name} was taken for lacking what it has")
            steps += made
            left_out.update(dict.fromkeys(lacking for lacking, *_ in missing))
    except ValidationError as error:
        raise plainly(error) from error
    except ValueError as error:
        raise InputError(str(error)) from error
    return Combined(steps, list(left_out))


@dataclass(frozen=True)
class Stored:
    """Recipes in the order asked for, and in words the combinations of pruning and quantization there are none of."""

    recipes: list[Recipe]
    left_out: list[str]


def ways_to_store(schemes: Sequence[str], sizes: Sequence[int]) -> list[QuantizeStep | None]:
    """Each scheme with each of the group ``sizes`` where it has groups, None for "none"; no sizes: the usual one.

    Raises InputError, in one sentence, for a scheme that is unknown or sizes that no chosen scheme can have.
    """
    ways: list[QuantizeStep | None] = []
    try:
        for name in schemes:
            if name == "none":
                ways.append(None)
            elif sizes and name in SCHEMES and SCHEMES[name].groups:
                ways += [QuantizeStep(scheme=name, group=size) for size in sizes]
            else:
                ways.append(QuantizeStep(scheme=name))
    except ValidationError as error:
        raise plainly(error) from error
    chosen = [way for way in ways if way is not None]
    if sizes and not any(way.what.groups for way in chosen):
        titles = ", ".join(way.what.title for way in chosen)
        raise InputError(
            f"{titles} has one scale per output channel: leave out the group size, or choose int4"
            if chosen
            else "A group size is for int4: choose a quantization with groups, or leave it out"
        )
    return ways


def store_each(
    steps: Sequence[PruneStep | None], ways: Sequence[QuantizeStep | None], device: str, widths: Sequence[int]
) -> Stored:
    """Each pruning step stored in each way; ``widths`` are the inputs of the model's layers as far as they are known.

    A combination that cannot be is left out where something else remains for that quantization. Raises InputError, in
    one sentence, where nothing does.
    """
    recipes: list[Recipe] = []
    refused: dict[str, dict[str, str]] = {}
    made: set[str] = set()
    for step, way in product(steps, ways):
        against = against_storing(step, way, device, widths)
        if way is None or against is None:
            recipes.append(Recipe(prune=step, quantize=way))
        else:
            refused.setdefault(way.scheme, {})[_pair_in_words(step, way, device)] = against
            continue
        made.update([way.scheme] if way is not None else [])
    for scheme, pairs in refused.items():
        if scheme not in made:
            raise InputError(next(iter(pairs.values())))
    return Stored(recipes, [words for pairs in refused.values() for words in pairs])


def against_storing(step: PruneStep | None, way: QuantizeStep | None, device: str, widths: Sequence[int]) -> str | None:
    """Why what ``step`` leaves cannot be stored that way on ``device``, in one sentence; None where it can.

    A device that is "auto" is known only once a run begins.
    """
    if way is None:
        return None
    method = step.method if step is not None and step.sparsity > 0 else None
    kind = None if device == "auto" else device.partition(":")[0]
    return objection(way.what, way.group, method=method, device=kind, widths=widths)


def _pair_in_words(step: PruneStep | None, way: QuantizeStep, device: str) -> str:
    method = step.method if step is not None and step.sparsity > 0 else None
    if way.what.methods is not None and method not in way.what.methods:
        return f"{way.what.title} {f'after {METHODS[method].title}' if method in METHODS else 'alone'}"
    return f"{way.what.title} in groups of {way.group}" if way.group is not None else f"{way} on {device}"


def is_structured(recipe: Recipe) -> bool:
    """Whether the variant is a smaller model of ordinary layers, and not one of the same shape with zeros in it."""
    step = recipe.prune
    return step is not None and step.sparsity > 0 and step.method in METHODS and METHODS[step.method].kind != "weights"


def can_share(recipe: Recipe) -> bool:
    """Whether statistics of the dense model can make this variant, which other variants can then be made from too."""
    step = recipe.prune
    if step is None or step.sparsity == 0 or step.method not in METHODS:
        return False
    return METHODS[step.method].kind == "weights" and METHODS[step.method].needs_calibration


def with_statistics(recipes: Sequence[Recipe], choice: StatisticsChoice) -> list[Recipe]:
    """``recipes`` with the statistics each is to be made from.

    "auto" shares them where that was measured to cost nothing, and where at least two variants would. Recipes that
    cannot share stay sequential. Raises InputError where "shared" was asked for and none can.
    """
    shared = [recipe for recipe in recipes if can_share(recipe)]
    if choice == "shared" and not shared:
        raise InputError(
            "Nothing here shares statistics with other variants: choose sequential statistics, or a method that "
            "removes single weights and looks at text"
        )
    if choice == "auto":
        shared = [recipe for recipe in shared if _costs_nothing(recipe)]
    if choice == "sequential" or (choice == "auto" and len(set(shared)) < 2):
        shared = []
    return [_shared(recipe) if recipe in shared else recipe for recipe in recipes]


def _lacking(name: str, pattern: Pattern | None, allocation: str) -> str | None:
    """What the method does not have, in words; None where it has it, or where that cannot be known."""
    method = METHODS.get(name)
    if method is None or allocation not in ALLOCATIONS:
        return None
    if pattern is not None and str(pattern) not in method.patterns:
        return f"{method.title} {pattern}"
    if allocation not in (UNIFORM, *method.allocations):
        return f"{method.title} with {ALLOCATIONS[allocation].title}"
    if pattern is not None and allocation != UNIFORM:
        return f"{pattern} with {ALLOCATIONS[allocation].title}"
    return None


def _step(name: str, share: float, pattern: Pattern | None, allocation: str, seed: int) -> PruneStep:
    seeded = name in METHODS and METHODS[name].seeded
    return PruneStep(method=name, sparsity=share, pattern=pattern, allocation=allocation, seed=seed if seeded else 0)


def _costs_nothing(recipe: Recipe) -> bool:
    step = recipe.prune
    assert step is not None
    limit = METHODS[step.method].shared_up_to
    return limit is not None and step.pattern is None and step.sparsity <= limit


def _shared(recipe: Recipe) -> Recipe:
    assert recipe.prune is not None
    return recipe.model_copy(update={"prune": recipe.prune.model_copy(update={"statistics": "shared"})})
