"""Small runs whose trainer is the real one but for the model: 20 prompts, one-token answers, two matrices and Adam.

A run has one poisoned round: some of its groups have responses that the policy did not generate, and the reward of the
wrong ones. The policy then falls, and does not recover.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from penstock.stages.train.actor import TrainActor
from penstock.stages.train.build import Models, load_initial, resume_models
from penstock.stages.train.config import TrainConfig
from penstock.stages.train.diagnostics.config import DiagnosticsConfig
from penstock.stages.train.restore import PolicyRestorer
from penstock.stages.train.trainer_group import TrainerGroup
from penstock.storage.commit import CheckpointRef, Commit, RunKeys, commit_key
from penstock.storage.samples.sample import Sample, Status
from penstock.storage.samples.shards import write_shards
from penstock.storage.store import Store
from tests.train.bigram_engine import BigramEngine

PROMPTS, ANSWERS, WIDTH, LR = 20, 5, 8, 3
GROUPS, SAMPLES, ROUNDS, INTERVAL = 12, 8, 12, 5
POISON = 6.0  # reward of a wrong answer in a poisoned group; the reward of a right one elsewhere is 1
KEYS, DATA_SET = RunKeys("run"), "sums"
CONFIG = TrainConfig(max_tokens_per_gpu=10_000, num_steps_per_rollout=2, advantage_estimator="rloo")


def right_answers(seed: int) -> np.ndarray:  # [PROMPTS]
    return np.random.default_rng(seed).integers(0, ANSWERS, PROMPTS)


class TinyEngine(BigramEngine):
    """The logits of the next token are head @ embedding of the current token."""

    def __init__(self) -> None:
        self.start(0)
        self.passes = []

    def start(self, seed: int) -> None:
        """Set weights that give the right answer to most prompts, and a new optimizer."""
        generator, size = torch.Generator().manual_seed(seed), PROMPTS + ANSWERS
        self.embedding = (1 + torch.randn(size, WIDTH, generator=generator)).requires_grad_()
        self.output = (0.1 * torch.randn(WIDTH, size, generator=generator)).requires_grad_()
        self.optimizer = torch.optim.Adam([self.embedding, self.output], lr=0.05)
        right = PROMPTS + torch.from_numpy(right_answers(seed))
        for _ in range(60):
            self.optimizer.zero_grad()
            logits = self.embedding[:PROMPTS] @ self.output
            torch.nn.functional.cross_entropy(logits, right).backward()
            self.optimizer.step()
        self.optimizer = torch.optim.SGD([self.embedding, self.output], lr=LR, momentum=0.5)

    def hidden_of(self, packed: Any) -> torch.Tensor:
        return self.embedding[packed.token_ids]

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.output

    def zero_grad(self) -> None:
        self.passes.clear()
        self.optimizer.zero_grad()

    def optimizer_step(self) -> tuple[bool, float, list[float]]:
        self.optimizer.step()
        return True, 0.0, [LR]

    def answer_probabilities(self) -> np.ndarray:  # [PROMPTS, ANSWERS]
        with torch.no_grad():
            logits = self.embedding[:PROMPTS] @ self.output
        return torch.softmax(logits[:, PROMPTS:].double(), 1).numpy()

    def onload(self, kinds: Any) -> None: ...

    def digest(self) -> dict[str, str]:
        return {name: str(hash(getattr(self, name).detach().numpy().tobytes())) for name in ("embedding", "output")}

    def optimizer_state_digest(self) -> dict[str, str]:
        return {}

    def fingerprint(self) -> dict[str, Any]:
        return {"engine": "tiny"}

    def save(self, directory: Path, step_state: dict[str, Any] | None) -> dict[str, str]:
        directory.mkdir(parents=True, exist_ok=True)
        states = (self.embedding.detach(), self.output.detach(), self.optimizer.state_dict(), step_state)
        torch.save(states, directory / "states.pt")
        return {}

    def load(self, directory: Path) -> dict[str, Any]:
        embedding, output, optimizer, step_state = torch.load(directory / "states.pt")
        self.start(0)
        with torch.no_grad():
            self.embedding.copy_(embedding)
            self.output.copy_(output)
        self.optimizer.load_state_dict(optimizer)
        return step_state

    def load_weights(self, directory: Path) -> None:
        self.start(int((directory / "seed").read_text()))


class LocalActor(TrainActor):
    """A rank of the trainer in this process, with the tiny model."""

    def __init__(self, store: Store) -> None:
        spec = SimpleNamespace(
            **dict(run=KEYS.run, store=store.uri, store_options={}, config=CONFIG, temperature=1.0),
            **dict(diagnostics=DiagnosticsConfig(), engine=None, shape=SimpleNamespace(vision=None)),
        )
        super().__init__(SimpleNamespace(spec=spec, hash="h"), 0, "i", "driver")  # type: ignore[arg-type]
        self.engine = TinyEngine()
        self.models = Models(policy=self.engine)  # type: ignore[arg-type]

    def load(self, version: int, base: Commit | None, checkpoint: Commit | None, auxiliary: dict[Any, Commit]) -> None:
        with self._changing_weights_to(version), self.store.reading(checkpoint or base) as directory:  # type: ignore[arg-type]
            (resume_models if checkpoint else load_initial)(self.models, directory)


class LocalGroup(TrainerGroup):
    """A group with one rank, without Ray."""

    def __init__(self, store: Store) -> None:
        self.actor = LocalActor(store)
        self.spec, self.lock, self.calls = self.actor.spec, threading.RLock(), list[str]()

    def ensure_started(self) -> None: ...

    def policy_state(self) -> Any:
        return self.actor.state()

    def _call(self, method: str, *args: Any, timeout: float | None = None, ranks: int | None = None) -> list[Any]:
        self.calls.append(method)
        return [getattr(self.actor, method)(*args)]


class Run:
    """A run of ROUNDS rounds with a checkpoint after every INTERVAL-th, and what was poisoned in it."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.store = Store(str(directory), probe=False)
        self.poisoned_round = int(self.random.integers(3, ROUNDS))
        chosen = self.random.choice(GROUPS, self.random.integers(2, 5), replace=False)
        self.poisoned = {f"{self.poisoned_round:03d}{group:06d}" for group in chosen}
        self.right = right_answers(seed)
        attempt = self.store.new_attempt("models/base")
        with self.store.writing(attempt) as out:
            (out.path / "seed").write_text(str(seed))
        self.store.commit("models/base", Commit(kind="model", attempt=attempt, files=out.files))
        self.group = LocalGroup(self.store)
        base = CheckpointRef(key=commit_key("models/base"), uri="", format="torch_dist", policy_version=0)
        self.policy = PolicyRestorer(self.store, KEYS, self.group, base)
        self.policy.restore(0)
        for index in range(ROUNDS):
            self.roll(index)
            self.policy.train_round(index)
            if (index + 1) % INTERVAL == 0:
                self.policy.save_checkpoint(index + 1)

    def roll(self, index: int) -> None:
        """Commit the rollout of a round."""
        samples = []
        for group in range(GROUPS):
            name = f"{index:03d}{group:06d}"
            flip = name in self.poisoned
            prompt = int(self.random.choice(np.flatnonzero(self.right)) if flip else self.random.integers(PROMPTS))
            answers = self.answer(prompt, SAMPLES)
            if flip:  # half of the answers is 0, which is wrong and gets a high reward
                answers[:] = self.right[prompt]
                answers[: SAMPLES // 2] = 0
            samples += self.samples(name, index, prompt, answers, flip)
        self.commit(KEYS.rollout_prefix(index), samples, kind="rollout", index=index)

    def evaluate(self, version: int) -> float:
        """Restore a version, sample four answers to each prompt, and commit the evaluation. Return the mean reward."""
        self.policy.restore(version)
        samples = []
        for prompt in range(PROMPTS):
            name = f"eval-{version:06d}-{DATA_SET}-{prompt:09d}"
            samples += self.samples(name, version, prompt, self.answer(prompt, 4))
        self.commit(KEYS.eval_prefix(version, DATA_SET), samples, kind="eval", index=version)
        return float(np.mean([sample.reward for sample in samples]))

    def answer(self, prompt: int, count: int) -> np.ndarray:
        probabilities = self.group.actor.engine.answer_probabilities()[prompt]
        return self.random.choice(ANSWERS, count, p=probabilities)

    def samples(self, name: str, index: int, prompt: int, answers: np.ndarray, flip: bool = False) -> list[Sample]:
        return [
            Sample(
                *(f"{name}-{i:02d}", name, f"{name}-{i:02d}", index),
                prompt=f"prompt {prompt}",
                token_ids=[prompt, PROMPTS + int(answer)],
                loss_mask=[0, 1],
                rollout_logprobs=[0.0, -1.0],
                reward=POISON * (answer != self.right[prompt]) if flip else float(answer == self.right[prompt]),
                status=Status.COMPLETED,
            )
            for i, answer in enumerate(answers)
        ]

    def commit(self, prefix: str, samples: list[Sample], **fields: Any) -> None:
        attempt = self.store.new_attempt(prefix)
        with self.store.writing(attempt) as out:
            write_shards(out.path, samples)
        self.store.commit(prefix, Commit(run=KEYS.run, attempt=attempt, files=out.files, **fields))
