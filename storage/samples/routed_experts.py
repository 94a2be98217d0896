"""The column `routed_experts`: the ids of the experts to which an engine routed the tokens of a sample, as bytes.

The bytes are expert ids of shape [R, MoE layers, top_k] for the first R tokens of the sample: uint8 for models with up
to 256 experts, else little-endian int16. The shape depends on the model, so readers need an `ExpertsFormat`. (Python
lists would take ten times the memory.) R is the number of tokens minus one, since an engine has no forward pass for the
last token that it samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.storage.errors import EngineError, RunError

UNKNOWN = -1  # instead of an expert id, for tokens without recorded routing


@dataclass(frozen=True)
class ExpertsFormat:
    """The properties of a model that determine shape and dtype of the expert ids."""

    num_layers: int  # of the whole model
    num_dense_layers: int  # layers without experts, which come first
    num_experts: int  # per layer
    top_k: int  # experts per token

    @property
    def routed_layers(self) -> range:
        """Return the indices of the MoE layers among all layers."""
        return range(self.num_dense_layers, self.num_layers)

    @property
    def _dtype(self) -> np.dtype[np.uint8] | np.dtype[np.int16]:
        return np.dtype(np.uint8) if self.num_experts <= 256 else np.dtype("<i2")

    def encode(self, chosen: np.ndarray, num_tokens: int) -> bytes:
        """Return the expert ids that an engine reported for a sample, encoded as bytes (see the module's docstring).

        Args:
            chosen: expert ids, [num_tokens * num_layers * top_k]; those of dense layers are ignored.
            num_tokens: R, the number of tokens with recorded routing.
        """
        needed = num_tokens * self.num_layers * self.top_k
        if chosen.size != needed:
            raise EngineError(
                f"the engine returned {chosen.size} routed experts, expected {needed} "
                f"({num_tokens} tokens x {self.num_layers} layers x {self.top_k} experts): serve the model that is "
                "trained"
            )
        routed = chosen.reshape(num_tokens, self.num_layers, self.top_k)[:, self.num_dense_layers :]
        ordered = np.sort(routed, axis=-1)
        if routed.size and (
            ordered[..., 0].min() < 0 or ordered.max() >= self.num_experts or not np.diff(ordered).all()
        ):
            raise EngineError(
                f"the engine returned routed expert ids that are not {self.top_k} different ids below "
                f"{self.num_experts} for each token: use another release of the engine, or --use-routing-replay "
                "instead of --use-rollout-routing-replay"
            )
        return routed.astype(self._dtype).tobytes()

    def decode(self, content: bytes | None, num_tokens: int) -> np.ndarray:
        """Return expert ids, [num_tokens, MoE layers, top_k] int16, with `UNKNOWN` for tokens without recorded routing.

        Args:
            content: bytes from `encode`, or None if the sample has no recorded routing.
            num_tokens: all tokens of the sample.
        """
        chosen = np.full((num_tokens, len(self.routed_layers), self.top_k), UNKNOWN, dtype=np.int16)
        if content:
            numbers = np.frombuffer(content, dtype=self._dtype)
            num_known, remainder = divmod(numbers.size, len(self.routed_layers) * self.top_k)
            if remainder or num_known > num_tokens:
                raise RunError(
                    f"routed_experts has {numbers.size} expert ids for a sample of {num_tokens} tokens, which does not "
                    f"match {len(self.routed_layers)} MoE layers and {self.top_k} experts per token: use the model "
                    "that generated the rollout"
                )
            chosen[:num_known] = numbers.reshape(num_known, -1, self.top_k)
        return chosen
