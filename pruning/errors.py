"""The two ways work can fail that a person should read about: what they asked, and what happened while doing it."""


class InputError(ValueError):
    """What was asked cannot be done. The message names the cause and what to do; nothing was started.

    The terminal answers it with exit code 2.
    """


class RunError(RuntimeError):
    """A run that had started could not be finished. The message names the cause and the lever.

    The terminal answers it with exit code 1.
    """


class CancelledError(Exception):
    """Raised out of a progress callback to stop the work at its next step; not a failure."""
