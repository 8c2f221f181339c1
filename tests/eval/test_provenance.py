"""Provenance: versions and names as the machine gives them."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import torch

from eval.provenance import _cpu_name, environment, library_versions


def test_versions_are_those_that_are_imported() -> None:
    versions = library_versions()
    assert versions["torch"] == torch.__version__
    assert versions["numpy"] == np.__version__
    assert {"transformers", "tokenizers", "safetensors"} <= set(versions)


def test_environment_is_json_and_dated_in_utc() -> None:
    found = environment(torch.device("cpu"))
    assert json.loads(json.dumps(found)) == found
    date = datetime.fromisoformat(str(found["date"]))
    assert date.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - date) < timedelta(minutes=1)
    assert found["device"] == "cpu"
    assert found["device_name"]
    assert found["threads"] == torch.get_num_threads()


def test_cpu_name_is_the_first_model_of_the_list(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Fast CPU @ 3 GHz\n\nmodel name\t: Slow CPU\n")
    assert _cpu_name(info) == "Fast CPU @ 3 GHz"


def test_no_cpu_name_where_there_is_no_list(tmp_path: Path) -> None:
    assert _cpu_name(tmp_path / "absent") is None
    (tmp_path / "other").write_text("Hardware : board\n")
    assert _cpu_name(tmp_path / "other") is None
