"""Stores full of plausible runs, for tests of pages and for benches: no model is loaded."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.runs import queue, transitions
from app.runs.checkpoints import BLOCKS_NOTE, checkpoint_folder
from app.runs.outcome import Outcome, PhaseTime
from app.runs.processes import this_process
from app.runs.spec import CalibrationSpec, RunSpec
from app.runs.store import Run, RunState, Store
from app.runs.transitions import Position
from eval.figures import Figure
from pruning.recipe import Pattern, PruneStep, QuantizeStep, Recipe

PARAMETERS = 134_515_008
PRUNABLE = 106_168_320
DENSE16 = 2 * PARAMETERS
DENSE16_PRUNED_LAYERS = 2 * PRUNABLE
SOURCE_BYTES = 98_000_000
DENSE_PERPLEXITY = 28.0
DAMAGE = {"magnitude": 40.0, "wanda": 5.0, "sparsegpt": 3.0}
"""Of the methods that a full store has runs of; others do as much as Wanda."""
PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
BLOCKS = 30


def recipe(
    method: str | None = "wanda", sparsity: float = 0.5, pattern: str | None = None, quantize: str | None = None
) -> Recipe:
    """Short for the recipe of one pruning step and one quantization, either of which may be None."""
    parsed = Pattern.parse(pattern) if pattern is not None else None
    share = parsed.sparsity if parsed is not None else sparsity
    return Recipe(
        prune=PruneStep(method=method, sparsity=share, pattern=parsed) if method is not None else None,
        quantize=QuantizeStep(scheme=quantize) if quantize is not None else None,
    )


def make_spec(
    method: str | None = "wanda",
    sparsity: float = 0.5,
    pattern: str | None = None,
    quantize: str | None = None,
    *,
    model: str = "bundled",
    seed: int = 0,
    device: str = "auto",
) -> RunSpec:
    """A spec of the bundled model with the default windows."""
    return RunSpec(
        model=model,
        recipe=recipe(method, sparsity, pattern, quantize),
        calibration=CalibrationSpec(seed=seed),
        device=device,
    )


def sharing(method: str, sparsity: float = 0.5, **asked: Any) -> RunSpec:
    """A spec of shared statistics; ``asked`` as in :func:`make_spec`."""
    spec = make_spec(method, sparsity, **asked)
    assert spec.recipe.prune is not None
    step = spec.recipe.prune.model_copy(update={"statistics": "shared"})
    return spec.model_copy(update={"recipe": spec.recipe.model_copy(update={"prune": step})})


def leave_blocks(run_id: str, done: int, total: int | None) -> None:
    """What a run that was stopped after ``done`` blocks leaves, each of 100 bytes."""
    folder = checkpoint_folder(run_id)
    folder.mkdir(parents=True)
    if total is not None:
        (folder / f"{BLOCKS_NOTE}.json").write_text(str(total))
    for index in range(done):
        (folder / f"block-{index:05d}.safetensors").write_bytes(bytes(100))


def make_outcome(
    spec: RunSpec,
    *,
    collapsed: bool = False,
    together: tuple[int, float] | None = None,
    versions: dict[str, str] | None = None,
    device_name: str = "Test CPU @ 2 cores",
    jitter: random.Random | None = None,
) -> Outcome:
    """Figures a small model might give: worse and smaller with sparsity, not faster unless in int8.

    ``together`` is how many variants shared statistics, and the seconds that took once for all.
    """
    noise = jitter or random.Random(0)
    prune, quantize = spec.recipe.prune, spec.recipe.quantize
    share = prune.sparsity if prune is not None else 0.0
    damage = DAMAGE.get(prune.method, 5.0) * share**3 if prune is not None else 0.0
    perplexity = DENSE_PERPLEXITY * (1 + damage) * noise.uniform(0.99, 1.01)
    kept = 1 - share
    bytes_a_weight = 1.0 if quantize is not None else 2.0
    layers = PRUNABLE * min(bytes_a_weight, kept * bytes_a_weight + 1 / 8)
    disk = round(layers + 2 * (PARAMETERS - PRUNABLE)) + 2_000_000
    token = (0.02 if quantize is not None else 0.045) * noise.uniform(0.97, 1.03)
    resident = round(PRUNABLE * bytes_a_weight + 2 * (PARAMETERS - PRUNABLE))
    figures = {
        "perplexity": Figure(
            None if collapsed else perplexity,
            "perplexity",
            low=None if collapsed else perplexity * 0.93,
            high=None if collapsed else perplexity * 1.08,
        ),
        "bits_per_byte": Figure(None if collapsed else perplexity**0.2 / 2, "bits/byte"),
        "sparsity": Figure(share, "fraction"),
        "size_on_disk": Figure(disk, "bytes"),
        "size_of_pruned_layers": Figure(round(layers), "bytes"),
        "bits_per_weight": Figure(8 * disk / PARAMETERS, "bits"),
        "resident_size": Figure(resident, "bytes"),
        "peak_memory": Figure(resident + 200_000_000, "bytes"),
        "prefill_time": Figure.from_samples([token * 6 * noise.uniform(0.95, 1.1) for _ in range(5)], "s"),
        "time_to_first_token": Figure.from_samples([token * 7 * noise.uniform(0.95, 1.1) for _ in range(5)], "s"),
        "time_per_output_token": Figure.from_samples([token * noise.uniform(0.95, 1.1) for _ in range(5)], "s"),
        "tokens_per_second": Figure.from_samples([noise.uniform(0.9, 1.05) / token for _ in range(5)], "tokens/s"),
        "compression_time": Figure(30 * noise.uniform(0.9, 1.1) if prune is not None else 0.0, "s"),
        **({"compression_peak_memory": Figure(900_000_000, "bytes")} if prune is not None else {}),
    }
    runtime = "aten int8" if quantize is not None else "torch eager"
    provenance: dict[str, Any] = {
        "model": {
            "name": "SmolLM2-135M-Instruct" if spec.model == "bundled" else Path(spec.model).name,
            "kind": "language model",
            "revision": None,
            "file_hash": spec.model_hash,
            "architecture": "LlamaForCausalLM",
            "parameters": PARAMETERS,
        },
        "compression": {
            "allocation": prune.allocation,
            "statistics": prune.statistics,
            "together": together[0] if together is not None else None,
            "common_seconds": together[1] if together is not None else None,
            "blocks_found_finished": 0,
            "note": None,
        }
        if prune is not None
        else None,
        "evaluation": {
            "source": spec.evaluation.source,
            "text_sha256": "0" * 64,
            "windows": spec.evaluation.windows,
            "length": spec.evaluation.length,
        },
        "dtype": "float32" if spec.dtype == "auto" else spec.dtype,
        "dtype_reason": "the device has no fast 16-bit arithmetic",
        "device": "cpu",
        "device_name": device_name,
        "host": "test-machine",
        "runtime": runtime,
        "versions": versions if versions is not None else {},
        "seed": spec.calibration.seed if spec.calibration is not None else None,
        "date": "2026-01-02T03:04:05+00:00",
    }
    tokens = spec.evaluation.windows * spec.evaluation.length
    return Outcome(
        figures=figures,
        provenance=provenance,
        collapsed=collapsed,
        sizes={
            "dense16_bytes": DENSE16,
            "dense16_pruned_layer_bytes": DENSE16_PRUNED_LAYERS,
            "source_bytes": SOURCE_BYTES,
            "source_name": "smollm2-135m-instruct-q4_1.gguf",
            "parameters": PARAMETERS,
        },
        layers=list(make_layers(prune, noise)) if prune is not None else [],
        runtime=runtime,
        artifact_bytes=disk,
        phases={
            "loading": PhaseTime(1.0, 1),
            **({"compressing": PhaseTime(30.0, 30)} if prune is not None else {}),
            "saving": PhaseTime(2.0, 1),
            "scoring": PhaseTime(0.002 * tokens, tokens),
            "timing": PhaseTime(6.0, 10),
        },
    )


def make_layers(prune: PruneStep, noise: random.Random) -> Iterator[dict[str, Any]]:
    """Reports of every layer; late blocks lose more where an allocation does not spread the share evenly."""
    looks = prune.looks_at_text
    for block in range(BLOCKS):
        for place, part in enumerate(PARTS):
            share = prune.sparsity
            if prune.allocation != "uniform":
                share += 0.1 * (block / (BLOCKS - 1) - 0.5)
            fell_back = looks and (block, place) in ((3, 1), (3, 2))
            yield {
                "name": f"model.layers.{block}.{part}",
                "shape": [576, 576],
                "requested_sparsity": share,
                "sparsity": share,
                "seconds": 0.05,
                "note": "pruned by Wanda: its statistics cannot be inverted" if fell_back else None,
                "tokens": 2048 if looks else 0,
                "sampled": 256 if looks else 0,
                "output_error": share**2 * (0.3 + 0.1 * place) * noise.uniform(0.8, 1.2) if looks else None,
                "outlier_ratio": noise.uniform(0.001, 0.02) if looks else None,
            }


def make_run(
    store: Store,
    spec: RunSpec | None = None,
    *,
    state: RunState = RunState.DONE,
    collapsed: bool = False,
    artifact: bool = False,
    error: str | None = None,
    outcome: Outcome | None = None,
) -> Run:
    """One attempt of ``spec`` in ``state``. ``artifact`` puts a small file where the variant would be.

    A running one is held by this process, so that nobody takes it for lost.
    """
    spec = spec or make_spec()
    if state is RunState.QUEUED:
        return transitions.add(store, spec, anew=True)[0]
    run, _ = transitions.add(store, spec, this_process(), anew=True)
    if state in (RunState.RUNNING, RunState.CANCELLING):
        transitions.beat(store, run.key, Position("compressing", 12, 30, "blocks", 2, 5, 42.0))
        if state is RunState.CANCELLING:
            transitions.ask_to_cancel(store, run.key)
    elif state is RunState.DONE:
        folder = queue.artifact_folder(run)
        if artifact:
            folder.mkdir(parents=True)
            (folder / "model.safetensors").write_bytes(bytes(1000))
        transitions.finish(store, run.key, outcome or make_outcome(spec, collapsed=collapsed), folder)
        if not artifact:
            transitions.forget_artifact(store, run.key)
    else:
        default = {RunState.FAILED: "The disk is full: free 300 MB.", RunState.LOST: queue.LOST_MESSAGE}
        transitions.end(store, run.key, state, error or default.get(state))
    return store.run(run.key)


def plausible_specs() -> Iterator[RunSpec]:
    """Dense, then methods, sparsities, patterns and int8 over more and more calibration seeds, without end."""
    yield make_spec(None)
    seed = 0
    while True:
        for method in DAMAGE:
            for quantize in (None, "int8"):
                for sparsity in (0.3, 0.4, 0.5, 0.6, 0.7):
                    if seed == 0 or method != "magnitude":
                        yield make_spec(method, sparsity, quantize=quantize, seed=seed)
                for pattern in ("2:4", "4:8"):
                    if seed == 0 or method != "magnitude":
                        yield make_spec(method, pattern=pattern, quantize=quantize, seed=seed)
        seed += 1


def fill(store: Store, n: int, *, others: bool = True, artifacts: bool = False) -> list[Run]:
    """``n`` finished runs, dense first, heavily pruned magnitude collapsed.

    With ``others`` also one failed, cancelled, lost, running and waiting run each. ``artifacts`` gives each finished
    run a small file on disk.
    """
    jitter = random.Random(1)
    made = []
    for spec, _ in zip(plausible_specs(), range(n), strict=False):
        prune = spec.recipe.prune
        collapsed = prune is not None and prune.method == "magnitude" and prune.sparsity >= 0.7
        outcome = make_outcome(spec, collapsed=collapsed, jitter=jitter)
        made.append(make_run(store, spec, artifact=artifacts, outcome=outcome))
    if others:
        for place, state in enumerate(
            (RunState.FAILED, RunState.CANCELLED, RunState.LOST, RunState.RUNNING, RunState.QUEUED)
        ):
            made.append(make_run(store, make_spec("sparsegpt", 0.8, seed=place), state=state))
    return made
