"""A configuration that was written to do harm does none."""

import json
from pathlib import Path

import pytest
import torch

from pruning.configs import MOST_BUFFER_BYTES, check_size, read_config
from pruning.errors import InputError
from tests.pruning.tiny import CONFIGS


def written(folder: Path, **changes: object) -> Path:
    config = CONFIGS["llama"]().to_dict()
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def test_kernels_from_a_repository_are_not_asked_for(tmp_path: Path) -> None:
    """With the kernels package installed, transformers would download and run them."""
    folder = written(tmp_path, attn_implementation="someone/attention", experts_implementation="someone/experts")
    config = read_config(folder)
    assert config._attn_implementation is None
    assert config._experts_implementation is None


@pytest.mark.parametrize(
    "name", ["num_hidden_layers", "num_labels", "n_layer", "num_local_experts", "num_attention_heads"]
)
def test_counts_that_no_model_has_are_refused_before_anything_is_made_of_them(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{name} is 10,000,000,000, more than any model has"):
        read_config(written(tmp_path, **{name: 10**10}))
    with pytest.raises(InputError, match="more than any model has"):
        read_config(written(tmp_path, text_config={name: 10**10}))


def test_sizes_that_are_large_in_real_models_are_read(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, vocab_size=256_000, max_position_embeddings=10_485_760, rope_theta=10**9))
    assert config.max_position_embeddings == 10_485_760


def test_memory_that_no_file_holds_is_refused(tmp_path: Path) -> None:
    """Rotary frequencies are head_dim / 2 numbers in float32, twice."""
    for head_dim, refused in ((MOST_BUFFER_BYTES // 4 + 2, True), (2**12, False)):
        config = read_config(written(tmp_path, head_dim=head_dim))
        if refused:
            with pytest.raises(InputError, match="bytes that are in no file"):
                check_size(config, torch.float32, tmp_path / "config.json", 10**9)
        else:
            check_size(config, torch.float32, tmp_path / "config.json", 10**9)


def test_a_model_many_times_as_large_as_its_files_is_refused(tmp_path: Path) -> None:
    config = read_config(written(tmp_path, vocab_size=10**6, tie_word_embeddings=True))
    with pytest.raises(InputError, match=r"of 32,0\d\d,\d\d\d parameters, and its files hold 1,000,000"):
        check_size(config, torch.float32, tmp_path / "config.json", 10**6)
    check_size(config, torch.float32, tmp_path / "config.json", 10**7)
