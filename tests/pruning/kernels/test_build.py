"""Building the kernels: once, whole, by several processes at a time, and doing without."""

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pruning.kernels import build, library
from pruning.kernels.build import NoKernelsError, built
from pruning.kernels.library import kernels

HERE = Path(__file__).parent
needs_compiler = pytest.mark.skipif(kernels() is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PODA_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(build.SWITCH, raising=False)


def command(tmp_path: Path, text: str) -> Path:
    """A program ``gcc`` in a folder of its own that runs ``text``."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    program = folder / "gcc"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return folder


@needs_compiler
def test_it_is_built_once_into_the_home_of_poda(tmp_path: Path) -> None:
    path = built()
    assert path.parent == tmp_path / "home" / "cache" / "kernels"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    when = path.stat().st_mtime_ns
    assert (built(), path.stat().st_mtime_ns) == (path, when)
    assert list(path.parent.iterdir()) == [path]


@needs_compiler
def test_another_source_or_compiler_is_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = built()
    source = tmp_path / "lowbit.c"
    source.write_text(f'/* changed */\n#include "{build.SOURCES[0]}"\n')
    monkeypatch.setattr(build, "SOURCES", (source, *build.SOURCES[1:]))
    second = built()
    compiler = build._compiler()
    wrapped = command(tmp_path, f'[ "$1" = --version ] && echo another || exec {compiler} "$@"')
    monkeypatch.setenv("CC", str(wrapped / "gcc"))
    assert len({first, second, built()}) == 3


@needs_compiler
def test_several_processes_may_build_at_once(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "pruning.kernels.build"]
    running = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    told = {process.communicate()[0] for process in running}
    assert [process.returncode for process in running] == [0] * 4
    assert told == {f"kernels: {built()}\n"}
    assert list(built().parent.iterdir()) == [built()]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("echo broken >&2; exit 1", "failed: broken"),
        ('[ "$1" = --version ] && exit 0; echo no such flag >&2; exit 1', "failed: no such flag"),
        ("exit 1", "failed: no message"),
    ],
)
def test_a_compiler_that_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, told: str) -> None:
    monkeypatch.setenv("CC", str(command(tmp_path, text) / "gcc"))
    with pytest.raises(NoKernelsError, match=told):
        built()
    folder = build.cache_folder()
    assert not folder.exists() or list(folder.iterdir()) == []


def test_without_a_compiler_or_turned_off_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(build.SWITCH, "off")
    with pytest.raises(NoKernelsError, match="PODA_KERNELS turns them off"):
        built()
    monkeypatch.delenv(build.SWITCH)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoKernelsError, match="no C compiler among gcc, cc, clang"):
        built()
    assert build.main() == 0
    assert "kernels: none, no C compiler" in capsys.readouterr().out
    monkeypatch.setattr(library, "_library", library._library.__wrapped__)
    assert kernels.__wrapped__() is None


def test_a_home_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PODA_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(build, "_compiler", lambda: str(command(tmp_path, "true") / "gcc"))
    with pytest.raises(NoKernelsError, match="nothing can be kept in"):
        built()


def test_a_library_that_does_not_load_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.so").write_text("no library")
    monkeypatch.setattr(library, "built", lambda: tmp_path / "broken.so")
    with pytest.raises(NoKernelsError, match="does not load"):
        library._library.__wrapped__()


@needs_compiler
@pytest.mark.parametrize("threads", ["1", "3"])
def test_nothing_is_read_or_written_beyond_the_tensors(tmp_path: Path, threads: str) -> None:
    """Every path over many shapes, in buffers of the exact size, under the compiler's own checks."""
    program = tmp_path / "harness"
    flags = ["-O2", "-g", "-std=gnu11", "-fopenmp", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    words = [build._compiler(), *flags, f"-I{build.SOURCES[0].parent}", "-o", str(program), str(HERE / "harness.c")]
    compiled = subprocess.run(words, capture_output=True, text=True)
    if "cannot find" in compiled.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert compiled.returncode == 0, compiled.stderr
    done = subprocess.run([str(program), threads], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 1000
