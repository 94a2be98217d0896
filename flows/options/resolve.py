"""What a run needs and only its start can know. Everything that starts or plans a run resolves its config here."""

from __future__ import annotations

from penstock.flows.config import PostTrainConfig
from penstock.flows.options.paths import with_function_names
from penstock.flows.promotion import with_champion
from penstock.flows.runtime.schedule import with_rounds_of_epochs


def resolve_config(flow: str, config: PostTrainConfig) -> PostTrainConfig:
    """Return the config with what is known only when a run starts: the champion of `--hf-checkpoint champion:MODEL`,
    the rounds of --num-epoch, and the names of user-defined functions.

    Raises:
        InputError: see `with_champion`, `with_rounds_of_epochs` and `with_function_names`.
    """
    return with_function_names(with_rounds_of_epochs(flow, with_champion(config)))
