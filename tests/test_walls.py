"""Arrows between the packages point one way, and pages stay light: checked in fresh interpreters."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "datasets", "accelerate")


def modules_of(*packages: str) -> list[str]:
    """Dotted names of every module in the packages, by file."""
    names = []
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def loaded_after(statement: str, watched: tuple[str, ...]) -> set[str]:
    """Which of the watched modules a fresh interpreter has loaded after the statement."""
    code = f"import sys\n{statement}\nprint(','.join(name for name in {watched!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(filter(None, done.stdout.strip().split(",")))


def test_pruning_and_eval_never_import_streamlit_or_the_app() -> None:
    names = modules_of("pruning", "eval")
    assert "pruning.recipe" in names
    assert loaded_after("import " + ", ".join(names), ("streamlit", "app")) == set()


def test_pruning_never_imports_eval() -> None:
    assert loaded_after("import " + ", ".join(modules_of("pruning")), ("eval", "app")) == set()


@pytest.mark.parametrize(
    "name",
    ["pruning.recipe", "pruning.sources", "pruning.texts", "pruning.methods", "pruning.quantize", "eval.figures"],
)
def test_what_pages_need_of_the_engine_imports_without_it(name: str) -> None:
    assert loaded_after(f"import {name}", HEAVY) == set()


def test_importing_the_app_loads_neither_torch_nor_transformers_nor_datasets() -> None:
    names = [
        name for name in modules_of("app") if not name.startswith("app.app_pages") and not name.endswith("__main__")
    ]
    names.remove("app.main")
    assert loaded_after("import " + ", ".join(names), HEAVY) == set()
