"""Compare two runs bit for bit: `python examples/reproducibility/compare.py STORE RUN OTHER`."""

import sys

from penstock.storage.commit import RunKeys
from penstock.storage.samples.shards import read_samples
from penstock.storage.store import Store


def differing_rounds(store: Store, run: str, other: str) -> list[str]:
    """Return, for every round of `run`, what differs from `other`: samples (with log-probs and rewards) or weights."""
    differences = []
    for index in store.committed_indices(f"{RunKeys(run).prefix}/rollouts"):
        samples, digests = [], []
        for name in (run, other):
            prefix = RunKeys(name).prefix
            rollout, step = (
                store.committed(f"{prefix}/rollouts/{index:06d}"),
                store.committed(f"{prefix}/steps/{index:06d}"),
            )
            samples.append([content(sample) for sample in read_samples(store, rollout)])
            digests.append(step.state["digest"])
        for what, (ours, theirs) in (("samples", samples), ("weights", digests)):
            if ours != theirs:
                differences.append(f"round {index}: {what}")
    return differences


def content(sample) -> tuple:
    """Return the parts of a sample that training depends on."""
    return sample.token_ids, sample.loss_mask, sample.rollout_logprobs, sample.reward


if __name__ == "__main__":
    store = Store(sys.argv[1])
    found = differing_rounds(store, *sys.argv[2:4])
    print("\n".join(found) or f"{sys.argv[2]} and {sys.argv[3]} are equal bit for bit")
    sys.exit(bool(found))
