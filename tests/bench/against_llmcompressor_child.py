"""Prunes a model with llmcompressor and prints the seconds; runs in llmcompressor's own environment, without Poda.

``PYTHON against_llmcompressor_child.py MODEL_FOLDER WINDOWS OUT METHOD SPARSITY DTYPE THREADS``
"""

import sys
import time

import torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

MODIFIERS = {"wanda": WandaPruningModifier, "sparsegpt": SparseGPTModifier}


def main() -> None:
    """See the module."""
    folder, windows, out, method, sparsity, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = load_file(windows)["ids"]
    data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
    modifier = MODIFIERS[method](
        sparsity=float(sparsity), mask_structure="0:0", targets=["Linear"], ignore=["re:.*lm_head"]
    )
    started = time.perf_counter()
    oneshot(
        model=model,
        tokenizer=tokenizer,
        dataset=data,
        recipe=[modifier],
        max_seq_length=ids.shape[1],
        num_calibration_samples=len(ids),
        shuffle_calibration_samples=False,
    )
    seconds = time.perf_counter() - started
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(state, out)
    print(seconds)


if __name__ == "__main__":
    main()
