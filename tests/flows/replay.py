"""Trains all committed rollouts of a run again from the base model, in one go, in a store that holds no checkpoint. Prints the digest as JSON.

A program of its own (not a test), because Ray lives once per process.
"""

import json
import sys

from flows.flags import parse
from flows.session import Session
from stages.convert.to_torch_dist import convert_hf


def main() -> None:
    config = parse(sys.argv[1:])
    with Session("post_train", config) as session:
        assert session.store.list(f"{session.keys.prefix}/checkpoints") == []
        session.begin_at(session.cluster.run(convert_hf, session.store, config.convert.hf_checkpoint))
        digest = session.trainer_at(config.run.num_rollout).digest()
    print(json.dumps(digest))


if __name__ == "__main__":
    main()
