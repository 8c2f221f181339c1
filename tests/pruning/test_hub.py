"""What the hub answers becomes a folder, or a cause and a next step; the hub itself is never asked."""

import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from pruning import hub
from pruning.errors import CancelledError, InputError, RunError
from pruning.hub import download
from pruning.sources import parse_reference

REFERENCE = parse_reference("owner/name@main")
COMMIT = "c" * 40


def _file(name: str, size: int, will_download: bool = True) -> Any:
    return SimpleNamespace(filename=name, file_size=size, will_download=will_download, commit_hash=COMMIT)


FILES = [_file("config.json", 10), _file("model.safetensors", 1000), _file("tokenizer.json", 90, False)]


def _response(status: int) -> httpx2.Response:
    return httpx2.Response(status, request=httpx2.Request("GET", "https://hub.test/owner/name"))


class Hub:
    """Stands in for snapshot_download: answers a dry run, then downloads in steps or raises."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[Any] = FILES
        self.errors: dict[str, Exception] = {}
        self.asked: list[dict[str, Any]] = []
        self.stalls: threading.Event | None = None

    def __call__(self, **wanted: Any) -> Any:
        self.asked.append(wanted)
        step = "dry" if wanted.get("dry_run") else "local" if wanted.get("local_files_only") else "download"
        if step in self.errors:
            raise self.errors[step]
        if step == "dry":
            return self.files
        if step == "download":
            received, files = wanted["tqdm_class"](total=0, unit="B"), wanted["tqdm_class"](total=3, unit="it")
            for _ in range(10):
                received.update(101)
            files.update(3)
            if self.stalls is not None:
                self.stalls.wait(10)
                received.update(1)
        return str(self.folder)


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    answering = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", answering)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    monkeypatch.setattr(hub, "POLL_SECONDS", 0.01)
    return answering


def test_a_download_asks_for_safetensors_at_the_commit_it_looked_at(answers: Hub, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int, str]] = []
    assert download(REFERENCE, lambda *step: seen.append(step)) == tmp_path
    looked, fetched = answers.asked
    assert (looked["repo_id"], looked["revision"]) == ("owner/name", "main")
    assert fetched["revision"] == COMMIT
    for asked in (looked, fetched):
        assert not any(pattern.endswith((".bin", ".py", ".pt")) for pattern in asked["allow_patterns"])
        assert "*.safetensors" in asked["allow_patterns"]
    assert seen[-1] == ("downloading", 1010, 1010, "bytes")
    assert all(0 <= done <= total == 1010 for _, done, total, _ in seen)


def test_a_download_is_cancelled_at_once_even_when_nothing_arrives(answers: Hub) -> None:
    answers.stalls = threading.Event()

    def stop(phase: str, done: int, total: int, unit: str) -> None:
        raise CancelledError

    with pytest.raises(CancelledError):
        download(REFERENCE, stop)
    thread = next(thread for thread in threading.enumerate() if thread.name == "download")
    answers.stalls.set()
    thread.join(5)
    assert not thread.is_alive()


def test_a_full_disk_is_found_before_the_download(answers: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1009 + 16_000_000))
    with pytest.raises(RunError, match=r"too full for the download of owner/name@main.*HF_HOME"):
        download(REFERENCE)
    assert len(answers.asked) == 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1010 + 16_000_000))
    download(REFERENCE)


def test_a_disk_that_fills_up_during_the_download_is_said(answers: Hub) -> None:
    answers.errors["download"] = OSError(28, "No space left on device")
    with pytest.raises(RunError, match=r"disk is full.*HF_HOME"):
        download(REFERENCE)


def test_pickled_weights_are_not_fetched(answers: Hub) -> None:
    answers.files = [_file("config.json", 10)]
    with pytest.raises(InputError, match="no weights in safetensors on the hub"):
        download(REFERENCE)
    assert len(answers.asked) == 1


@pytest.mark.parametrize(
    ("error", "token", "why"),
    [
        (GatedRepoError("x", response=_response(403)), None, r"owner/name is gated: accept its licence.*hf auth login"),
        (GatedRepoError("x", response=_response(403)), "t", r"gated.*ask for access there with the account of"),
        (RepositoryNotFoundError("x", response=_response(401)), None, r"no model owner/name on the hub.*hf auth login"),
        (RepositoryNotFoundError("x", response=_response(404)), "t", "your token may not see it"),
        (RevisionNotFoundError("x", response=_response(404)), None, "has no revision 'main'"),
        (HfHubHTTPError("502", response=_response(502)), None, "the hub refused.*try again later"),
        (HFValidationError("x"), None, "is no hub id"),
        (httpx2.ConnectError("x"), None, "could not be reached"),
        (httpx2.ReadTimeout("x"), None, "could not be reached"),
        (OfflineModeIsEnabled("x"), None, "could not be reached.*HF_HUB_OFFLINE"),
    ],
)
@pytest.mark.parametrize("step", ["dry", "download"])
def test_every_answer_has_a_cause_and_a_next_step(
    answers: Hub, monkeypatch: pytest.MonkeyPatch, step: str, error: Exception, token: str | None, why: str
) -> None:
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: token)
    answers.errors[step] = error
    with pytest.raises(InputError, match=why):
        download(REFERENCE)


def test_without_a_network_what_was_downloaded_before_is_used(answers: Hub, tmp_path: Path) -> None:
    answers.errors["dry"] = DryRunError("no access")
    assert download(REFERENCE) == tmp_path
    assert answers.asked[-1]["local_files_only"] is True


@pytest.mark.parametrize(
    ("cause", "why"),
    [
        (httpx2.ConnectError("x"), "could not be reached.*no whole copy"),
        (GatedRepoError("x", response=_response(403)), "gated"),
        (RepositoryNotFoundError("x", response=_response(404)), "no model owner/name"),
        (None, "could not be reached"),
    ],
)
def test_without_a_copy_the_reason_of_the_hub_is_given(answers: Hub, cause: Exception | None, why: str) -> None:
    failure = DryRunError("no access")
    failure.__cause__ = cause
    answers.errors = {"dry": failure, "local": LocalEntryNotFoundError("none")}
    with pytest.raises(InputError) as caught:
        download(REFERENCE)
    assert re.search(why, str(caught.value))
