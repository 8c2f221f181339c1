"""RunSpec: all that is needed to make and measure one variant again, and the id that follows from it."""

import hashlib
import json
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from pruning.recipe import Frozen, PruneStep, Recipe

BUNDLED_ARTICLES = "articles"

_LATER = {name: PruneStep.model_fields[name].default for name in ("allocation", "statistics", "seed")}


class CalibrationSpec(Frozen):
    """Token windows to calibrate on: ``windows`` of ``length`` tokens at offsets drawn with ``seed``.

    ``source`` is "articles" (bundled), a text file, or a ``datasets`` name; ``text_hash`` is a file's SHA-256.
    """

    source: str = BUNDLED_ARTICLES
    text_hash: str | None = None
    windows: int = Field(default=8, ge=1)
    length: int = Field(default=256, ge=8)
    seed: int = Field(default=0, ge=0)


class EvaluationSpec(Frozen):
    """Text to measure on: the first ``windows`` consecutive windows of ``length`` tokens of ``source``."""

    source: str = BUNDLED_ARTICLES
    text_hash: str | None = None
    windows: int = Field(default=16, ge=1)
    length: int = Field(default=512, ge=8)


class RunSpec(Frozen):
    """One variant of one model, and how it is measured.

    ``model`` is "bundled", a folder, a GGUF file or a hub id; ``model_hash`` is the SHA-256 of a file or folder, so
    that the same path with other content is another run. Fields that cannot matter (calibration of a recipe that
    does not look at text) are cleared, so that dense is one run whatever was asked beside it.
    """

    model: str
    revision: str | None = None
    model_hash: str | None = None
    recipe: Recipe = Recipe()
    calibration: CalibrationSpec | None = Field(default=None, validate_default=True)
    evaluation: EvaluationSpec = EvaluationSpec()
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"

    @field_validator("calibration")
    @classmethod
    def _only_where_it_matters(
        cls, calibration: CalibrationSpec | None, info: ValidationInfo
    ) -> CalibrationSpec | None:
        recipe: Recipe | None = info.data.get("recipe")
        if recipe is None:
            return calibration
        if recipe.needs_calibration and calibration is None:
            raise ValueError(f"{recipe} looks at calibration text: say which")
        return calibration if recipe.needs_calibration else None

    def dense(self) -> "RunSpec":
        """The unpruned model under the same protocol."""
        return self.model_copy(update={"recipe": Recipe(), "calibration": None})

    @property
    def run_id(self) -> str:
        """Twelve hexadecimal digits of the SHA-256 of the fields, files by content and not by path.

        Fields of a step that came later than others count only where they say something: the ids of recipes that could
        be asked for before stay what they were.
        """
        fields = self.model_dump(mode="json")
        if fields["recipe"]["quantize"] is not None and fields["recipe"]["quantize"]["group"] is None:
            del fields["recipe"]["quantize"]["group"]
        if fields["recipe"]["prune"] is not None:
            for name, default in _LATER.items():
                if fields["recipe"]["prune"][name] == default:
                    del fields["recipe"]["prune"][name]
        if self.model_hash is not None:
            fields["model"] = None
        for text in (fields["calibration"], fields["evaluation"]):
            if text is not None and text["text_hash"] is not None:
                text["source"] = None
        canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]
