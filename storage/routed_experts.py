"""The column `routed_experts`: the experts that an engine sent the tokens of a sample to, as bytes.

The bytes are R x layers with experts x top_k numbers, for the first R of the sample's tokens: uint8 for models of up to 256 experts, else
little-endian int16. What they mean beyond that is the model's, so a reader needs its numbers (`ExpertsFormat`); a list of numbers would
cost ten times the memory as Python objects. An engine does not run the last token it samples, so R is the number of tokens less one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from storage.errors import EngineError, RunError

UNKNOWN = -1  # in place of an expert


@dataclass(frozen=True)
class ExpertsFormat:
    """A model's numbers that the bytes depend on."""

    num_layers: int
    num_dense_layers: int  # the first ones have no experts
    num_experts: int
    top_k: int

    @property
    def routed_layers(self) -> range:
        """Layers with experts, of the whole model, from 0."""
        return range(self.num_dense_layers, self.num_layers)

    @property
    def _dtype(self) -> np.dtype[np.uint8] | np.dtype[np.int16]:
        return np.dtype(np.uint8) if self.num_experts <= 256 else np.dtype("<i2")

    def encode(self, chosen: np.ndarray, num_tokens: int) -> bytes:
        """The bytes of what an engine says.

        Args:
            chosen: [num_tokens * num_layers * top_k], of all layers, whatever it says of those without experts.
            num_tokens: R, for which it speaks.

        Raises:
            EngineError: it says something else, or names an expert twice or one that does not exist.
        """
        if chosen.size != num_tokens * self.num_layers * self.top_k:
            raise EngineError(
                f"the engine returned {chosen.size} routed experts for {num_tokens} tokens, {self.num_layers} layers and "
                f"{self.top_k} experts a token: it must serve the model that is trained"
            )
        routed = chosen.reshape(num_tokens, self.num_layers, self.top_k)[:, self.num_dense_layers :]
        ordered = np.sort(routed, axis=-1)
        if routed.size and (ordered[..., 0].min() < 0 or ordered.max() >= self.num_experts or not np.diff(ordered).all()):
            raise EngineError(
                f"the engine returned a choice that is not {self.top_k} different ones of {self.num_experts} experts: "
                "use another release of SGLang, or --use-routing-replay"
            )
        return routed.astype(self._dtype).tobytes()

    def decode(self, content: bytes | None, num_tokens: int) -> np.ndarray:
        """[num_tokens, layers with experts, top_k] int16, `UNKNOWN` for tokens after the R known ones.

        Args:
            content: of one sample; None: nothing is known.
            num_tokens: of the sample.

        Raises:
            RunError: the bytes are those of another model.
        """
        chosen = np.full((num_tokens, len(self.routed_layers), self.top_k), UNKNOWN, dtype=np.int16)
        if content:
            numbers = np.frombuffer(content, dtype=self._dtype)
            num_known, left = divmod(numbers.size, len(self.routed_layers) * self.top_k)
            if left or num_known > num_tokens:
                raise RunError(
                    f"routed_experts holds {numbers.size} numbers for a sample of {num_tokens} tokens, which does not fit "
                    f"{len(self.routed_layers)} layers and {self.top_k} experts a token: the rollout was made with another model"
                )
            chosen[:num_known] = numbers.reshape(num_known, -1, self.top_k)
        return chosen
