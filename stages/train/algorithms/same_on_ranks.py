"""Call a user-defined function on every rank of the trainer, with equal arguments, and check that the ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch.distributed as dist
import xxhash
from torch import Tensor

from penstock.stages.plugins import describe_error
from penstock.storage.errors import PluginError

T = TypeVar("T")
ADVICE = (
    "make it depend on its arguments alone, and not on random numbers, the time, or the files and variables of one "
    "process"
)


def call_on_every_rank(call: Callable[[], T], tensors_of: Callable[[T], Iterable[Tensor | None]], name: str) -> T:
    """Return the result of `call` after checking that it is the same on all ranks. Collective, also if `call` raises.

    Args:
        call: calls the user-defined function, and checks its result.
        tensors_of: returns the tensors of a result that are compared.
        name: option and path of the function, for messages.

    Raises:
        PluginError: `call` fails on some ranks only, or its results differ between ranks.
        Exception: the exception of `call`, if it fails on every rank.
    """
    if not dist.is_initialized():
        return call()
    own, failure = "", None
    try:
        result = call()
        bits = [
            values.detach().cpu().contiguous().numpy().tobytes() for values in tensors_of(result) if values is not None
        ]
        own = xxhash.xxh3_64(b"".join(bits)).hexdigest()
    except Exception as error:
        failure = error
    outcomes: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
    dist.all_gather_object(outcomes, (own, "" if failure is None else describe_error(failure)))
    failed = [rank for rank, (_, reason) in enumerate(outcomes) if reason]
    if failure is not None and len(failed) == len(outcomes):
        raise failure
    if len(set(outcomes)) > 1:
        problem = f"has different results on the {len(outcomes)} ranks of the trainer"
        if failed:
            reason = outcomes[failed[0]][1]
            problem = f"fails on rank {failed[0]} of the trainer ({reason}), but not on all {len(outcomes)} ranks"
        raise PluginError(f"{name} {problem}: {ADVICE}") from failure
    return result
