"""Brings a model from the Hugging Face hub into its local cache, or says why it cannot be had."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pruning.disk import check_free, disk_error
from pruning.errors import CancelledError, InputError
from pruning.progress import Progress, silent
from pruning.sources import ModelReference

PHASE = "downloading"
WANTED = ["*.safetensors", "*.json", "*.txt", "*.jinja", "tokenizer.model"]
"""Weights in safetensors, configuration and tokenizer; pickled weights and code are never fetched."""

UNWANTED = ["*/*", "consolidated*"]
POLL_SECONDS = 0.25
LEVER = "Free some space, or set HF_HOME to a folder on a larger disk"


def download(reference: ModelReference, progress: Progress = silent) -> Path:
    """The local folder of a hub model, downloaded when it is not there yet.

    The token is the person's own, from HF_TOKEN or the hub's login. Without a network a copy downloaded before is
    used. Raises InputError when the model is not there, is gated, has no safetensors, or the hub cannot be reached;
    RunError when the disk has no room for it.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import DryRunError

    wanted: dict[str, Any] = {
        "repo_id": reference.location,
        "revision": reference.revision,
        "allow_patterns": WANTED,
        "ignore_patterns": UNWANTED,
    }
    with _explained(reference):
        try:
            files = snapshot_download(**wanted, dry_run=True)
        except DryRunError as error:
            return _cached(wanted, error)
        if not any(file.filename.endswith(".safetensors") for file in files):
            raise InputError(
                f"{reference} has no weights in safetensors on the hub, and pickled weights or GGUF are not fetched "
                "from there: choose a repository with .safetensors files, or give a .gguf file by its path"
            )
        missing = sum(file.file_size or 0 for file in files if file.will_download)
        check_free(Path(constants.HF_HUB_CACHE), missing, f"the download of {reference}", LEVER)
        # The very commit whose sizes were looked at, whatever is pushed meanwhile.
        wanted["revision"] = files[0].commit_hash
        return Path(_watched(wanted, missing, progress))


def _cached(wanted: dict[str, Any], failure: Exception) -> Path:
    """The copy downloaded before, or what kept the hub from answering."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(**wanted, local_files_only=True))
    except LocalEntryNotFoundError:
        raise (failure.__cause__ or failure) from None


def _watched(wanted: dict[str, Any], total: int, progress: Progress) -> str:
    """Download in a thread of its own, so that this one can tell progress, and stop when that raises."""
    from huggingface_hub import snapshot_download
    from tqdm import tqdm  # type: ignore[import-untyped]  # it has no type hints

    arrived: dict[int, int] = {}
    stopped = threading.Event()

    class Bar(tqdm):
        """A bar that draws nothing and counts the bytes that have arrived."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.in_bytes = options.get("unit") == "B"
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> None:
            if stopped.is_set():
                raise CancelledError("the download was stopped")
            if self.in_bytes:
                arrived[id(self)] = arrived.get(id(self), 0) + int(n or 0)

    outcome: Future[str] = Future()

    def fetch() -> None:
        try:
            outcome.set_result(snapshot_download(**wanted, tqdm_class=Bar))
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=fetch, name="download", daemon=True).start()
    try:
        while not wait([outcome], timeout=POLL_SECONDS).done:
            # One bar counts bytes received, another bytes written: the one that is ahead is the better news.
            progress(PHASE, min(max(list(arrived.values()), default=0), total), total, "bytes")
    finally:
        stopped.set()
    folder = outcome.result()
    progress(PHASE, total, total, "bytes")
    return folder


@contextmanager
def _explained(reference: ModelReference) -> Iterator[None]:
    """Turn what the hub's client raises into a cause and a next step."""
    import httpx2
    from huggingface_hub import constants, get_token
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

    page = f"https://huggingface.co/{reference.location}"
    log_in = "log in with `hf auth login`, or set HF_TOKEN"
    try:
        yield
    except GatedRepoError as error:
        step = "ask for access there with the account of your token" if get_token() else f"then {log_in}"
        raise InputError(f"{reference.location} is gated: accept its licence at {page}, {step}") from error
    except RevisionNotFoundError as error:
        raise InputError(
            f"{reference.location} has no revision {reference.revision!r}: see its branches and tags at {page}"
        ) from error
    except RepositoryNotFoundError as error:
        private = "your token may not see it" if get_token() else f"if it is private, {log_in}"
        raise InputError(
            f"no model {reference.location} on the hub, and no such folder here: check the spelling; {private}"
        ) from error
    except HFValidationError as error:
        raise InputError(f"{reference} is no hub id: it looks like owner/name[@revision]") from error
    except HfHubHTTPError as error:
        raise InputError(f"the hub refused {reference} ({error}): try again later, or {log_in}") from error
    except (DryRunError, LocalEntryNotFoundError, OfflineModeIsEnabled, httpx2.TransportError) as error:
        raise InputError(
            f"the hub could not be reached for {reference}, and no whole copy of it was downloaded before: check the "
            "network (and HF_HUB_OFFLINE), or use the bundled model, a folder or a .gguf file"
        ) from error
    except OSError as error:
        raise disk_error(error, Path(constants.HF_HUB_CACHE), f"the download of {reference}", LEVER) from error
