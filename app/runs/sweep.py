"""Several variants asked for at once, checked and made into specs without loading a model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import ValidationError

from app.runs.combinations import (
    Combined,
    StatisticsChoice,
    Stored,
    combine,
    store_each,
    ways_to_store,
    with_statistics,
)
from app.runs.plain import plainly
from app.runs.spec import CalibrationSpec, EvaluationSpec, RunSpec
from pruning.allocation import UNIFORM
from pruning.errors import InputError
from pruning.methods import METHODS
from pruning.recipe import Frozen, PruneStep, Recipe
from pruning.sources import ModelReference, content_hash, input_widths, parse_reference
from pruning.texts import load_text, text_identity

NOTHING = "none"

TextSpec = TypeVar("TextSpec", CalibrationSpec, EvaluationSpec)


class SweepRequest(Frozen):
    """Every method at every sparsity and pattern under every allocation, with every quantization, beside dense.

    ``methods`` and ``quantize`` may hold "none"; method "none" asks for quantization alone. ``groups`` are the sizes
    for quantizations that have groups, none for their usual one. The seed of ``calibration`` is also that of methods
    that draw random numbers.
    """

    model: str = "bundled"
    methods: tuple[str, ...] = ()
    sparsities: tuple[float, ...] = ()
    patterns: tuple[str, ...] = ()
    allocations: tuple[str, ...] = (UNIFORM,)
    statistics: StatisticsChoice = "auto"
    quantize: tuple[str, ...] = (NOTHING,)
    groups: tuple[int, ...] = ()
    calibration: CalibrationSpec = CalibrationSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"

    def specs(self) -> list[RunSpec]:
        """Dense first. Raises InputError, in one sentence, when a method can be made in no combination."""
        pruning = self._pruning()
        if pruning and not (self.sparsities or self.patterns):
            titles = ", ".join(METHODS[method].title if method in METHODS else method for method in pruning)
            raise InputError(f"{titles} needs at least one sparsity or pattern: choose how much to remove")
        if not pruning and (self.sparsities or self.patterns):
            raise InputError("A sparsity or pattern needs a method that removes weights: choose one")
        if not self.quantize:
            raise InputError('Choose at least one of the quantizations; "none" keeps 16 or 32 bits')
        if not self.allocations:
            raise InputError('Choose at least one of the allocations; "uniform" removes the same share everywhere')
        recipes = [Recipe(), *self._stored().recipes]
        try:
            base = RunSpec(model=self.model, evaluation=self.evaluation, device=self.device, dtype=self.dtype)
        except ValidationError as error:
            raise plainly(error) from error
        recipes = with_statistics(list(dict.fromkeys(recipes)), self.statistics)
        base = identified(base)
        calibration = self.calibration
        if any(recipe.needs_calibration for recipe in recipes):
            calibration = identified_text(calibration)
        specs = [RunSpec(**{**dict(base), "recipe": recipe, "calibration": calibration}) for recipe in recipes]
        return list({spec.run_id: spec for spec in specs}.values())

    def left_out(self) -> list[str]:
        """In words, what was asked for and cannot be combined. Raises InputError as :meth:`specs` does."""
        return [*self._combined().left_out, *self._stored().left_out]

    def _pruning(self) -> list[str]:
        return [method for method in self.methods if method != NOTHING]

    def _stored(self) -> Stored:
        steps: list[PruneStep | None] = [None] if NOTHING in self.methods or not self.methods else []
        steps += self._combined().steps
        ways = ways_to_store(self.quantize, self.groups)
        return store_each(steps, ways, self.device, input_widths(parse_reference(self.model)))

    def _combined(self) -> Combined:
        return combine(self._pruning(), self.sparsities, self.patterns, self.allocations, self.calibration.seed)


@dataclass(frozen=True)
class Preset:
    """A sweep worth starting with."""

    title: str
    description: str
    request: SweepRequest


PRESETS: dict[str, Preset] = {
    "look": Preset(
        title="One-minute look",
        description="The bundled model, and half of it removed by Wanda, on a little text",
        request=SweepRequest(
            methods=("wanda",),
            sparsities=(0.5,),
            calibration=CalibrationSpec(windows=8, length=128),
            evaluation=EvaluationSpec(windows=8, length=256),
        ),
    ),
    "methods": Preset(
        title="Methods compared",
        description="Magnitude, Wanda and SparseGPT at 30%, 50% and 60%",
        request=SweepRequest(methods=("magnitude", "wanda", "sparsegpt"), sparsities=(0.3, 0.5, 0.6)),
    ),
    "bits": Preset(
        title="Fewer bits",
        description="Nothing removed: int8, and int4 rounded to nearest and by GPTQ",
        request=SweepRequest(quantize=("int8", "int4", "gptq-int4")),
    ),
    "small": Preset(
        title="As small as it gets",
        description="int8 and int4, each with 50% or 2:4 removed by SparseGPT as well",
        request=SweepRequest(
            methods=("sparsegpt",), sparsities=(0.5,), patterns=("2:4",), quantize=(NOTHING, "int8", "joint-int4")
        ),
    ),
}


def identified(spec: RunSpec) -> RunSpec:
    """``spec`` with paths made absolute and files named by content, so that its id follows from what is in them.

    Raises InputError when the model or a text is not there.
    """
    reference = parse_reference(spec.model)
    evaluation = identified_text(spec.evaluation)
    calibration = identified_text(spec.calibration) if spec.calibration is not None else None
    return spec.model_copy(
        update={
            "model": reference.location,
            "revision": reference.revision or spec.revision,
            "model_hash": content_hash(reference),
            "evaluation": evaluation,
            "calibration": calibration,
        }
    )


def identified_text(text: TextSpec) -> TextSpec:
    """``text`` with its file, where it is one, by absolute path and content.

    Raises InputError for a file that is empty, not UTF-8, or too short whatever the tokenizer: a token is at least
    a byte of it.
    """
    text_hash = text_identity(text.source)
    if text_hash is None:
        return text
    evaluation = isinstance(text, EvaluationSpec)
    found = load_text(text.source, "evaluation" if evaluation else "calibration")
    windows = text.windows if evaluation else 1
    if len(found.content.encode()) < windows * text.length:
        asked = f"{windows} windows" if evaluation else "one calibration window"
        raise InputError(
            f"{found.name} has {len(found.content.encode()):,} bytes of text, too few for {asked} of {text.length} "
            "tokens: lower the windows or their length, or give a longer text"
        )
    source = str(Path(text.source).expanduser().resolve())
    return text.model_copy(update={"source": source, "text_hash": text_hash})


def reference_of(spec: RunSpec) -> ModelReference:
    """The model of a spec. Raises InputError when it is not there any more."""
    reference = parse_reference(spec.model)
    return reference.model_copy(update={"revision": spec.revision}) if spec.revision is not None else reference
