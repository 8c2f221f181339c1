"""What the form asks for, as a sweep, and the asking itself."""

from collections.abc import Sequence

from pydantic import ValidationError

from app.runs import queue
from app.runs.library import add_model
from app.runs.plain import plainly
from app.runs.store import Store
from app.runs.sweep import SweepRequest
from app.wording import parse_share
from pruning.errors import InputError
from pruning.quantize import SCHEMES
from pruning.sources import BUNDLED, parse_reference

UNSTRUCTURED = "unstructured"


def request_for(
    *,
    methods: Sequence[str],
    shares: Sequence[str],
    patterns: Sequence[str],
    stored: Sequence[str],
    groups: Sequence[int] = (),
    **rest: object,
) -> SweepRequest:
    """A sweep from what was chosen; ``rest`` are fields of the sweep as they are.

    Sparsities count only for methods, and only where weights may be removed anywhere; group sizes only for
    quantizations with groups. Raises InputError, in one
    sentence, for what cannot be made.
    """
    if not methods and not stored:
        raise InputError("Nothing is chosen: choose a method, or a way to store the weights")
    if methods and not patterns:
        raise InputError("Choose where weights may be removed: anywhere, or in a pattern")
    anywhere = UNSTRUCTURED in patterns
    if methods and anywhere and not shares:
        raise InputError("Choose what share of the weights to remove")
    fields = {
        "methods": tuple(methods),
        "sparsities": tuple(parse_share(share) for share in shares) if methods and anywhere else (),
        "patterns": tuple(pattern for pattern in patterns if pattern != UNSTRUCTURED) if methods else (),
        "quantize": tuple(stored),
        "groups": tuple(groups) if any(SCHEMES[name].groups for name in stored if name in SCHEMES) else (),
        **rest,
    }
    try:
        return SweepRequest.model_validate(fields)
    except ValidationError as error:
        raise plainly(error) from error


def ask_for(store: Store, request: SweepRequest) -> list[queue.Submitted]:
    """Ask for every run of a sweep and have it worked on; its model stays on the list. Raises InputError."""
    specs = request.specs()
    reference = str(parse_reference(request.model))
    if reference != BUNDLED:
        add_model(store, reference)
    submitted = queue.submit(store, specs)
    queue.ensure_workers(store)
    return submitted
