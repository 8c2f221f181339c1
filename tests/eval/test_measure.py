"""Everything measured of one variant: which figures, in which units, from which protocol."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from eval.latency import LatencyProtocol
from eval.measure import Measurement, measure
from eval.perplexity import score
from pruning.artifact import StoredSizes
from pruning.calibration import Windows
from pruning.errors import CancelledError, RunError
from pruning.runtime import Variant
from tests.eval.tiny import BytesTokenizer, llama, windows

QUICK = LatencyProtocol(prompt_tokens=6, output_tokens=4, iterations=2, minimum_seconds=0)
UNITS = {
    "perplexity": "perplexity",
    "bits_per_byte": "bits/byte",
    "sparsity": "fraction",
    "sparsity_of_model": "fraction",
    "size_on_disk": "bytes",
    "size_of_pruned_layers": "bytes",
    "resident_size": "bytes",
    "peak_memory": "bytes",
    "bits_per_weight": "bits",
    "prefill_time": "s",
    "time_to_first_token": "s",
    "time_per_output_token": "s",
    "tokens_per_second": "tokens/s",
}


def variant() -> Variant:
    return Variant(
        model=llama(),
        tokenizer=BytesTokenizer(),
        header={},
        sizes=StoredSizes(
            total_bytes=1000,
            weight_file_bytes=900,
            pruned_layer_bytes=600,
            pruned_layer_weights=300,
            dense16_bytes=900,
            dense16_pruned_layer_bytes=600,
            parameters=450,
        ),
        folder=Path(),
        device=torch.device("cpu"),
        dtype=torch.float32,
        runtime="torch eager",
    )


def data() -> Windows:
    return Windows(windows(), {"source": "a text", "text_sha256": "ab12"})


@pytest.fixture(scope="module")
def measured() -> Measurement:
    return measure(variant(), data(), protocol=QUICK)


def test_gives_every_figure_in_its_unit(measured: Measurement) -> None:
    assert {name: figure.unit for name, figure in measured.figures.items()} == UNITS
    assert all(figure.value is not None for figure in measured.figures.values())


def test_quality_is_that_of_the_windows(measured: Measurement) -> None:
    expected = score(llama(), BytesTokenizer(), windows())
    assert measured.figures["perplexity"] == expected.perplexity
    assert measured.figures["bits_per_byte"] == expected.bits_per_byte
    assert measured.collapsed == expected.collapsed


def test_provenance_is_json_and_tells_data_machine_and_protocol(measured: Measurement) -> None:
    provenance: dict[str, Any] = measured.provenance
    assert json.loads(json.dumps(provenance, allow_nan=False)) == provenance
    assert provenance["evaluation"] == {
        "source": "a text",
        "text_sha256": "ab12",
        "windows": 5,
        "length": 12,
        "predicted_tokens": 55,
        "predicted_bytes": 55,
    }
    assert provenance["dtype"] == "float32"
    assert provenance["runtime"] == "torch eager"
    assert provenance["timing"]["prompt_tokens"] == 6
    assert provenance["timing"]["timed"] == "alone"
    assert provenance["versions"]["torch"] == torch.__version__


def test_a_collapsed_model_is_measured_to_the_end() -> None:
    broken = variant()
    with torch.no_grad():
        broken.model.get_input_embeddings().weight.fill_(math.nan)
    result = measure(broken, data(), protocol=QUICK)
    assert result.collapsed
    assert set(result.figures) == set(UNITS)
    assert result.figures["perplexity"].value is None
    assert result.figures["tokens_per_second"].value is not None


def test_dropout_is_off() -> None:
    training = variant()
    training.model.train()
    measure(training, data(), protocol=QUICK)
    assert not training.model.training


@pytest.mark.parametrize("phase", ["scoring", "timing"])
def test_cancelling_passes_through_in_either_phase(phase: str) -> None:
    calls: list[str] = []

    def cancel(name: str, done: int, total: int, unit: str) -> None:
        calls.append(name)
        if name == phase:
            raise CancelledError

    with pytest.raises(CancelledError):
        measure(variant(), data(), protocol=QUICK, progress=cancel)
    assert calls.count(phase) == 1


def test_running_out_of_memory_names_the_lever() -> None:
    starved = variant()
    with torch.no_grad():
        starved.model.forward = lambda **_: torch.empty(2**60)
    with pytest.raises(RunError, match="does not fit in the memory of cpu: use a shorter evaluation length"):
        measure(starved, data(), protocol=QUICK)


def test_another_failure_is_not_called_a_lack_of_memory() -> None:
    broken = variant()
    broken.model.forward = lambda **_: torch.zeros(2) @ torch.zeros(3)
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        measure(broken, data(), protocol=QUICK)
