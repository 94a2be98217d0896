"""Check that the engines have exactly the trainer's weights after an update (`--check-weight-update-equal`).

An engine shards, fuses (qkv, gate and up, experts) and converts what it loads, so its parameters cannot be compared
with the trainer's tensors by name. They are compared through the engine itself, on every rank:

1. The trainer writes its tensors to files, reads them back and compares them. The engine loads the files as it loads a
   model; the checksums of its parameters are the expected ones.
2. All parameters are overwritten with random values: a tensor that is not sent, or not loaded, cannot stay correct.
3. The weights are sent over the run's transport. The checksums must be those of step 1.

A new engine has loaded version 0 from --hf-checkpoint without the trainer. Its checksums must be those of step 1, too:
otherwise the conversion or the gathering of shards, which steps 1 and 3 have in common, changed a tensor.

An engine's own comparison (`/weights_checker` with `snapshot` and `compare`) is not sufficient: it answers for rank 0
only, and the snapshot is equal to the trainer's weights only at the first update.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from penstock.engines.generation import REFERENCE, EngineClient, WeightTransport
from penstock.storage.errors import WeightMismatch

INITIAL = "hf-checkpoint"  # version that an engine reports while it has the weights of --hf-checkpoint
Checksums = Mapping[str, list[dict[str, str]]]  # URL -> for each rank of the engine, tensor -> checksum


def update_and_check(
    client: EngineClient,
    publish: Callable[[str, WeightTransport], None],
    version: str,
    transport: WeightTransport,
    *,
    is_initial: bool,
) -> tuple[int, float]:
    """Send the trainer's weights to all engines of a client and check that every tensor arrived. If the weights are
    those of --hf-checkpoint (`is_initial`), engines that report `INITIAL`, which loaded them without the trainer, are
    compared, too.

    Returns:
        The number of compared tensors, over all ranks of all engines, and the seconds of the update itself.
    """
    initial: Checksums = {}
    if is_initial and any(client.weight_version(url) == INITIAL for url in client.urls):
        checksums = client.weight_checksums()
        initial = {url: checksums[url] for url in client.urls if client.weight_version(url) == INITIAL}
    publish(f"{REFERENCE}{version}", replace(transport, kind="disk"))
    expected = client.weight_checksums()
    _compare(
        {url: expected[url] for url in initial},
        initial,
        f"in the engine as it loaded --hf-checkpoint, but {{expected}} after loading the trainer's {version}: the "
        "conversion or the gathering of shards changed the tensor; report this as a bug",
    )
    client.overwrite_weights()
    start = time.perf_counter()
    publish(version, transport)
    seconds = time.perf_counter() - start
    try:
        num_tensors = _compare(
            expected,
            client.weight_checksums(),
            f"in the engine after the weight update to {version} ({transport.kind}), but {{expected}} in the trainer: "
            "try another --update-weight-transport, and report this as a bug",
        )
        return num_tensors, seconds
    except WeightMismatch:
        client.overwrite_weights()
        raise


def _compare(expected: Checksums, actual: Checksums, where: str) -> int:
    """Compare checksums and return their number. Raises WeightMismatch for the first difference; its message ends with
    `where`, with the expected checksum for `{expected}`."""
    different, total = [], 0
    for url, ranks in expected.items():
        for rank, (before, after) in enumerate(zip(ranks, actual[url], strict=True)):
            names = sorted(before.keys() | after.keys())
            total += len(names)
            different += [
                (url, rank, name, before.get(name, "missing"), after.get(name, "missing"))
                for name in names
                if before.get(name) != after.get(name)
            ]
    if different:
        url, rank, name, checksum, found = different[0]
        raise WeightMismatch(
            f"engine {url}, rank {rank}: {name} ({len(different)} of {total} tensors differ) has checksum {found} "
            f"{where.format(expected=checksum)}"
        )
    return total
