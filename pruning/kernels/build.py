"""Builds the C kernels with the system's compiler, once, into the user's cache: python -m pruning.kernels.build."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from platformdirs import user_cache_path

SOURCES = tuple(Path(__file__).with_name(name) for name in ("lowbit.c", "lowbit.h", "lowbit_simd.h"))
COMPILERS = ("gcc", "cc", "clang")
FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC")
THREADS = ("-fopenmp",)
SWITCH = "PODA_KERNELS"
"""Environment variable; ``off`` leaves the kernels alone."""

PATIENCE = 120
"""Seconds a compiler may take."""


class NoKernelsError(Exception):
    """Why there are no kernels here, in a few words."""


def cache_folder() -> Path:
    """Where built kernels are kept: under PODA_HOME where that is set, else in the user's cache."""
    chosen = os.environ.get("PODA_HOME")
    root = Path(chosen).expanduser().absolute() / "cache" if chosen else user_cache_path("poda", appauthor=False)
    return root / "kernels"


def built() -> Path:
    """The shared library, compiled now unless the same source was by the same compiler for the same architecture.

    What the CPU can do is no part of that: the library asks it. Processes may build at once; each writes a file of its
    own and moves it into place whole. Raises NoKernelsError where they are turned off, or cannot be built or kept.
    """
    if os.environ.get(SWITCH, "").lower() in ("off", "0", "no", "false"):
        raise NoKernelsError(f"{SWITCH} turns them off")
    compiler = _compiler()
    version = _run([compiler, "--version"])
    # clang brings an OpenMP runtime of its own, whose threads would spin against those of torch.
    flags = FLAGS if "clang" in version else FLAGS + THREADS
    parts = [version, platform.system(), platform.machine(), *flags, *(path.read_text("utf-8") for path in SOURCES)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    library = cache_folder() / f"lowbit-{key}.so"
    if library.is_file():
        return library
    unfinished = None
    try:
        library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(suffix=".tmp", dir=library.parent)
        os.close(handle)
        unfinished = Path(name)
        _run([compiler, *flags, "-o", name, str(SOURCES[0])])
        unfinished.replace(library)
    except OSError as error:
        raise NoKernelsError(f"nothing can be kept in {library.parent}: {error.strerror or error}") from error
    finally:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)
    return library


def _compiler() -> str:
    if platform.system() == "Windows":
        raise NoKernelsError("they are not built on Windows")
    for name in filter(None, (os.environ.get("CC"), *COMPILERS)):
        found = shutil.which(name)
        if found is not None:
            return found
    raise NoKernelsError(f"no C compiler among {', '.join(COMPILERS)}")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoKernelsError(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        told = (done.stderr.strip() or "no message").splitlines()[0]
        raise NoKernelsError(f"{command[0]} failed: {told}")
    return done.stdout


def main() -> int:
    """Build, and say where to or why not; 0 either way, since all that needs kernels works without."""
    try:
        sys.stdout.write(f"kernels: {built()}\n")
    except NoKernelsError as error:
        sys.stdout.write(f"kernels: none, {error}; quantized layers run on those of torch\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
