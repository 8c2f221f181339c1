"""What may be asked for: a recipe of pruning, then quantization, validated before any work starts."""

import re
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pruning.allocation import ALLOCATIONS, UNIFORM
from pruning.methods import METHODS, Statistics
from pruning.quantize import SCHEMES, Scheme, objection

MAXIMUM_SPARSITY = 0.95


class Frozen(BaseModel):
    """Options that cannot change after they were validated and refuse fields they do not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Pattern(Frozen):
    """N:M sparsity: at most ``kept`` non-zero weights in each ``group`` consecutive inputs."""

    kept: int = Field(ge=1)
    group: int = Field(ge=2)

    @model_validator(mode="after")
    def _keeps_fewer_than_all(self) -> Self:
        if self.kept >= self.group:
            raise ValueError(f"{self} removes nothing: N:M keeps N of each M inputs, so N must be below M, as in 2:4")
        return self

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read ``"2:4"``. Raises ValueError for anything that is not two whole numbers with N below M."""
        match = re.fullmatch(r"\s*(\d+):(\d+)\s*", text)
        if match is None:
            raise ValueError(f"{text!r} is not a pattern: write N:M with whole numbers, as in 2:4 or 4:8")
        return cls(kept=int(match[1]), group=int(match[2]))

    @property
    def sparsity(self) -> float:
        """Share of weights removed, 1 - N/M."""
        return 1 - self.kept / self.group

    def __str__(self) -> str:
        return f"{self.kept}:{self.group}"


class PruneStep(Frozen):
    """Remove a share of the weights of the prunable layers.

    ``sparsity`` is the share asked for of all of them together, 0 to 0.95; ``pattern``, where given, fixes it.
    ``allocation`` spreads it over the layers. ``statistics`` are those of the model pruned so far, block after block
    ("sequential"), or those of the dense model, which variants made together share ("shared"); a method that looks at
    no text has none, and then it is always "sequential". ``seed`` counts only for methods that draw random numbers.
    """

    method: str
    sparsity: float = Field(ge=0, le=MAXIMUM_SPARSITY)
    pattern: Pattern | None = None
    allocation: str = UNIFORM
    statistics: Literal["sequential", "shared"] = "sequential"
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        method = METHODS.get(self.method)
        if method is None:
            raise ValueError(f"unknown method {self.method!r}: choose one of {', '.join(METHODS)}")
        if self.allocation not in ALLOCATIONS:
            raise ValueError(f"unknown allocation {self.allocation!r}: choose one of {', '.join(ALLOCATIONS)}")
        if self.allocation not in (UNIFORM, *method.allocations):
            raise ValueError(f"{method.title} has no {self.allocation} allocation: choose {UNIFORM}")
        if self.statistics == "shared" and (method.kind != "weights" or not method.needs_calibration):
            raise ValueError(f"{method.title} shares no statistics with other variants: choose sequential statistics")
        if self.pattern is not None:
            if str(self.pattern) not in method.patterns:
                offered = " or ".join(method.patterns) or "a sparsity without one"
                raise ValueError(f"pattern {self.pattern} is not offered by {method.title}: choose {offered}")
            if abs(self.sparsity - self.pattern.sparsity) > 1e-9:
                raise ValueError(
                    f"pattern {self.pattern} fixes the sparsity at {self.pattern.sparsity:g}: "
                    f"leave out the sparsity {self.sparsity:g}"
                )
            if self.allocation != UNIFORM:
                raise ValueError(
                    f"pattern {self.pattern} removes the same share everywhere, so it takes no {self.allocation} "
                    f"allocation: choose {UNIFORM}, or a sparsity without a pattern"
                )
        return self

    @property
    def looks_at_text(self) -> bool:
        """Whether making this variant looks at calibration text."""
        return METHODS[self.method].needs_calibration or self.allocation != UNIFORM

    def __str__(self) -> str:
        share = str(self.pattern) if self.pattern is not None else f"{self.sparsity * 100:g}%"
        details = [] if self.allocation == UNIFORM else [ALLOCATIONS[self.allocation].title]
        details += ["shared"] if self.statistics == "shared" else []
        return f"{METHODS[self.method].title} {share}" + (f" ({', '.join(details)})" if details else "")


class QuantizeStep(Frozen):
    """Store the weights of every prunable layer in fewer bits, where ``scheme`` has groups with a scale for ``group``
    consecutive inputs; without one, its usual group."""

    scheme: str
    group: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _usual_group(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("group") is None and fields.get("scheme") in SCHEMES:
            groups = SCHEMES[fields["scheme"]].groups
            return {**fields, "group": groups[0] if groups else None}
        return fields

    @model_validator(mode="after")
    def _is_known(self) -> Self:
        if self.scheme not in SCHEMES:
            raise ValueError(f"unknown quantization {self.scheme!r}: choose one of {', '.join(SCHEMES)}")
        return self

    @property
    def what(self) -> Scheme:
        """The scheme as the registry has it."""
        return SCHEMES[self.scheme]

    def __str__(self) -> str:
        usual = self.group is None or self.group == self.what.groups[0]
        return self.what.title if usual else f"{self.what.title} g{self.group}"


class Recipe(Frozen):
    """Prune first, then quantize; either may be absent, and both absent is the dense model."""

    prune: PruneStep | None = None
    quantize: QuantizeStep | None = None

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.quantize is not None:
            pruned = self.prune is not None and self.prune.sparsity > 0
            method = self.prune.method if self.prune is not None and pruned else None
            against = objection(self.quantize.what, self.quantize.group, method=method)
            if against is not None:
                raise ValueError(against)
        return self

    @property
    def needs_calibration(self) -> bool:
        """Whether making this variant looks at calibration text."""
        rounding = self.quantize is not None and self.quantize.what.statistics != "none"
        return rounding or (self.prune is not None and self.prune.looks_at_text)

    @property
    def statistics(self) -> Statistics:
        """What must be known of the inputs of layers, to prune and to round."""
        steps = {METHODS[self.prune.method].statistics} if self.prune is not None else set()
        steps |= {self.quantize.what.statistics} if self.quantize is not None else set()
        known: tuple[Statistics, ...] = ("gram", "norms")
        return next((kind for kind in known if kind in steps), "none")

    def __str__(self) -> str:
        steps = [str(step) for step in (self.prune, self.quantize) if step is not None]
        return " + ".join(steps) if steps else "Dense"
