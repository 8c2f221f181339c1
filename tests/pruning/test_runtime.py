"""A variant is ready to run from its folder alone, and says on which kernels."""

import shutil
from pathlib import Path

import pytest
import torch

from pruning import runtime
from pruning.artifact import save_artifact, stored_sizes
from pruning.compress import compress
from pruning.device import MPS_NOTE
from pruning.errors import InputError, RunError
from pruning.kernels.library import kernels
from pruning.quantize.int8 import FEW_TOKENS, has_int8_kernel
from pruning.recipe import PruneStep, QuantizeStep, Recipe
from pruning.runtime import load_variant, runtime_of
from tests.pruning.folders import tiny_tokenizer
from tests.pruning.kernels.ways import never_own, own_where_possible
from tests.pruning.tiny import tiny_ids, tiny_model

RECIPE = Recipe(prune=PruneStep(method="magnitude", sparsity=0.5), quantize=QuantizeStep(scheme="int8"))


def _save(folder: Path, recipe: Recipe = RECIPE, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    model = tiny_model("llama", dtype=dtype)
    compress(model, recipe, None)
    save_artifact(model, tiny_tokenizer(), folder, {"recipe": str(recipe)})
    return model


def test_all_that_is_needed_is_the_folder(tmp_path: Path) -> None:
    saved = _save(tmp_path / "variant")
    sizes = stored_sizes(tmp_path / "variant")
    variant = load_variant(tmp_path / "variant", device="cpu")
    shutil.rmtree(tmp_path / "variant")
    with torch.no_grad():
        assert torch.equal(variant.model(tiny_ids()).logits, saved(tiny_ids()).logits)
    assert variant.tokenizer("w4 w6").input_ids == [4, 6]
    assert variant.header["recipe"] == "Magnitude 50% + int8"
    assert variant.sizes == sizes
    assert (variant.device, variant.dtype) == (torch.device("cpu"), torch.bfloat16)
    assert variant.folder == tmp_path / "variant"


def test_it_decodes_the_same_with_a_cache_as_without(tmp_path: Path) -> None:
    """One token at a time takes the int8 kernel, where there is one; all at once, dequantized weights."""
    _save(tmp_path / "variant", dtype=torch.float32)
    variant = load_variant(tmp_path / "variant", device="cpu")
    ids = tiny_ids(windows=1, length=FEW_TOKENS + 4)
    with torch.no_grad():
        whole = variant.model(ids).logits
        cache, steps = None, []
        for position in range(ids.shape[1]):
            step = variant.model(ids[:, position : position + 1], past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            steps.append(step.logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, rtol=1e-4, atol=1e-5)


def test_the_kernels_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never_own(monkeypatch)
    _save(tmp_path / "variant")
    # Layers of 48 inputs are no whole number of the kernel's steps.
    named = load_variant(tmp_path / "variant", device="cpu").runtime
    kernel = f"aten int8 up to {FEW_TOKENS} tokens, dequantized to bfloat16 above; "
    expected = (kernel if has_int8_kernel("cpu", torch.bfloat16, 32, 32) else "") + "dequantized int8 to bfloat16"
    assert named == expected
    _save(tmp_path / "variant", dtype=torch.float32)
    assert load_variant(tmp_path / "variant", device="cpu").runtime == "dequantized int8 to float32"
    own_where_possible(monkeypatch)
    found = kernels()
    name = f"poda int8 ({found.path}) up to {FEW_TOKENS} tokens, " if found is not None else ""
    suffix = "dequantized to float32 above" if found is not None else "dequantized int8 to float32"
    assert load_variant(tmp_path / "variant", device="cpu").runtime == name + suffix
    _save(tmp_path / "variant", Recipe())
    variant = load_variant(tmp_path / "variant", device=torch.device("cpu"))
    assert variant.runtime == "torch bfloat16"
    assert runtime_of(variant.model, torch.float32, torch.device("mps")) == f"torch float32; {MPS_NOTE}"


def test_what_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="is no variant"):
        load_variant(tmp_path / "nowhere", device="cpu")
    _save(tmp_path / "variant")
    with pytest.raises(InputError, match="toaster"):
        load_variant(tmp_path / "variant", device="toaster")
    (tmp_path / "variant" / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"tokenizer\.json is missing"):
        load_variant(tmp_path / "variant", device="cpu")
    _save(tmp_path / "again")

    def full(*given: object, **named: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.nn.Module, "to", full)
    with pytest.raises(RunError, match="the variant again does not fit in memory"):
        runtime.load_variant(tmp_path / "again", device="cpu")
