"""Worker processes: who works on a run, whether that process still lives, and how one is started."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

import psutil
from filelock import FileLock, Timeout

from app import paths
from app.runs.transitions import Holder

SECONDS_BETWEEN_STARTS = 5.0
SILENCE_SECONDS = 60.0
LONGEST_LOG = 5_000_000

_CLOCK_TOLERANCE_SECONDS = 2.0
_started: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
_starting = threading.Lock()


def this_process() -> Holder:
    """The holder that this process is."""
    return Holder(host=socket.gethostname(), pid=os.getpid(), started=psutil.Process().create_time())


def is_gone(holder: Holder, heartbeat: float) -> bool:
    """Whether the process cannot be working any more.

    On this host the process itself is looked up; of another host only the age of its last sign of life is known.
    """
    if holder.host != socket.gethostname():
        return time.time() - heartbeat > SILENCE_SECONDS
    try:
        process = psutil.Process(holder.pid)
        if abs(process.create_time() - holder.started) > _CLOCK_TOLERANCE_SECONDS:
            return True
        return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


def device_lock(device: str) -> FileLock:
    """Held by whoever computes on ``device`` ("cpu", "cuda:1"); the system lets go of it when its process dies."""
    return FileLock(paths.locks() / f"device-{_file_name(device)}.lock", thread_local=False)


def worker_lock(device: str) -> FileLock:
    """Held by the one worker that serves runs asked for ``device``, for as long as it lives."""
    return FileLock(paths.locks() / f"worker-{_file_name(device)}.lock", thread_local=False)


def worker_log(device: str) -> Path:
    """Where the worker that serves ``device`` writes what it does, tracebacks included."""
    return paths.logs() / f"worker-{_file_name(device)}.log"


def worker_lives(device: str) -> bool:
    """Whether some worker serves runs asked for ``device``."""
    lock = worker_lock(device)
    try:
        with lock.acquire(timeout=0):
            return False
    except Timeout:
        return True


def start_worker(device: str, command: tuple[str, ...] | None = None) -> bool:
    """Start a detached worker for ``device`` unless one lives or was started moments ago; True when one was started.

    ``command`` stands in for ``python -m app worker --device DEVICE``.
    """
    place = str(worker_log(device))
    with _starting:
        process, moment = _started.get(place, (None, 0.0))
        if process is not None and (process.poll() is None or time.monotonic() - moment < SECONDS_BETWEEN_STARTS):
            return False
        if worker_lives(device):
            return False
        root = Path(__file__).parents[2]
        log = worker_log(device)
        if log.exists() and log.stat().st_size > LONGEST_LOG:
            log.replace(log.with_suffix(".old.log"))
        with log.open("ab") as output:
            started = _detached(
                command or (sys.executable, "-P", "-m", "app", "worker", "--device", device), root, output
            )
        _started[place] = (started, time.monotonic())
        return True


def _detached(command: tuple[str, ...], root: Path, output: IO[bytes]) -> "subprocess.Popen[bytes]":
    path = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    if os.environ.get("PODA_HOME"):
        environment["PODA_HOME"] = str(paths.home())
    if sys.platform == "win32":
        flags = subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.DETACHED_PROCESS
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, creationflags=flags
        )
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )


def _file_name(device: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in device)
