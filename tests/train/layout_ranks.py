"""Train the same rollouts with four processes under every layout, and compare everything with one rank;
`test_layout_matrix.py` starts it.

usage: layout_ranks.py DIRECTORY [NUM_RANKS [SELECTION]]

With NUM_RANKS 2, only the layouts of two ranks run: on GPUs every rank needs its own. SELECTION is `all` (default) or
`some`, the cases of SOME.

Each process first is a world of its own (the references), then all four are one world, then two pairs are two worlds
side by side, and last one of each pair is alone again. A case is a model under a layout:

    the base model         -> round 0 -> saved
    another layout's files -> rounds 1, 2, 3 -> its own files again, whose bits must be back

So the files of every layout are loaded under another one, and a layout that forgets something differs in the rounds
after. What is right without Megatron is for the tests in tests/engines that compare with Hugging Face.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import traceback
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.engines.families.shape import Experts, LatentAttention, ModelShape, Rotary, YarnScaling
from penstock.engines.megatron.parallel import ParallelLayout, device, init_parallel, shutdown_parallel
from penstock.stages.train.batching import Batch
from penstock.stages.train.build import build_models, load_auxiliary_model, load_initial, resume_models, save_models
from penstock.stages.train.config import TrainConfig
from penstock.storage.samples.sample import to_table
from tests.engines.megatron_reference import make_engine, replace_by_gradients
from tests.random_rollouts import samples

TOLERANCE = 2e-5  # relative: of metrics, and of gradients and movements of weights to the largest of their tensor
ROUNDING = 2**-22  # relative: what a weight is rounded to, over two steps and on both sides
VANISHING = 1e-6  # absolute: of metrics that are means of numbers of both signs
TEMPERATURE = 0.9

COMMON: dict[str, Any] = dict(
    **dict(num_layers=4, hidden_size=40, ffn_hidden_size=56, num_attention_heads=4, num_query_groups=2, head_dim=16),
    vocab_size=61,  # odd: tensor parallelism must pad it
    **dict(max_position_embeddings=256, norm_epsilon=1e-6, qk_layernorm=True, qkv_bias=False, tied_embeddings=False),
)
EXPERTS: dict[str, Any] = dict(num_experts=8, ffn_hidden_size=24, shared_ffn_hidden_size=24, score="sigmoid", bias=True)
# Without experts in stage 0 of 2.
OF_LATENT: dict[str, Any] = dict(top_k=3, num_dense_layers=2, num_groups=4, top_groups=2, scaling=2.5)
YARN = YarnScaling(factor=4.0, original_max_positions=64, mscale_all_dim=1.0)
MODELS = {
    "dense": ModelShape(
        **COMMON | dict(tied_embeddings=True),
        architecture="Qwen3ForCausalLM",
        family="qwen3",
        rotary=Rotary(base=10000.0),
    ),
    "mixture": ModelShape(
        **COMMON | dict(qkv_bias=True),
        architecture="Glm4MoeForCausalLM",
        family="glm4_moe",
        rotary=Rotary(base=10000.0, fraction=0.5),
        experts=Experts(**EXPERTS, top_k=2, num_dense_layers=1),
    ),
    "latent": ModelShape(
        **COMMON | dict(num_query_groups=4, head_dim=24),
        architecture="DeepseekV3ForCausalLM",
        family="deepseek_v3",
        rotary=Rotary(base=10000.0, interleaved=True, scaling=YARN),
        latent=LatentAttention(q_lora_rank=24, kv_lora_rank=20, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12),
        experts=Experts(**EXPERTS, **OF_LATENT),
    ),
}
ALL, MIXTURES = list(MODELS), ["mixture", "latent"]


# ---- layouts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    layout: ParallelLayout
    models: list[str]
    megatron: dict[str, Any] = field(default_factory=dict)


SEQUENCE: dict[str, Any] = dict(tensor=2, sequence_parallel=True)
BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 3000}  # with padding between them
FOUR_RANKS = {
    "tensor x pipeline": Case(ParallelLayout(**SEQUENCE, pipeline=2), ALL),
    "tensor x context": Case(ParallelLayout(**SEQUENCE, context=2), ALL),
    "experts x pipeline": Case(ParallelLayout(expert=2, pipeline=2), MIXTURES),
}
TWO_RANKS = [  # of each pair of processes
    {
        "tensor": Case(ParallelLayout(tensor=2), ["dense"]),
        "context": Case(ParallelLayout(context=2), ALL),
        "data": Case(ParallelLayout(), ALL, BUCKETS),
        "experts": Case(ParallelLayout(expert=2), MIXTURES),
        "grouped experts": Case(ParallelLayout(expert=2), MIXTURES, {"moe_grouped_gemm": True}),
        "tensor and experts": Case(ParallelLayout(**SEQUENCE, expert=2, expert_tensor=1), MIXTURES),
    },
    {
        "sequence": Case(ParallelLayout(**SEQUENCE), ALL),
        "pipeline": Case(ParallelLayout(pipeline=2), ALL),
        "virtual pipeline": Case(ParallelLayout(pipeline=2, virtual_pipeline=2), ALL),
        "whole experts": Case(ParallelLayout(**SEQUENCE, expert_tensor=1), MIXTURES),
        "whole grouped experts": Case(
            ParallelLayout(**SEQUENCE, expert_tensor=1), MIXTURES, {"moe_grouped_gemm": True}
        ),
    },
]
SOME = {  # layout -> models: every kind of parallelism and every model, tied weights under a pipeline
    "context": ["latent"],
    "data": ["dense"],
    "grouped experts": ["mixture"],
    "tensor and experts": ["latent"],
    "sequence": ["dense"],
    "pipeline": ["dense"],
    "virtual pipeline": ["mixture"],
}
ON_GPUS = {"cut experts": Case(ParallelLayout(expert_tensor=2), MIXTURES)}  # gloo cannot gather parts of unequal length
ALONE = Case(ParallelLayout(), ALL)


# ---- configurations --------------------------------------------------------------------------------------------------

OPTIMIZER: dict[str, Any] = dict(
    lr=1e-2,
    min_lr=1e-3,
    adam_beta2=0.98,
    adam_eps=1e-3,  # else gradients that are rounding errors become whole steps
    clip_grad=0.1,  # always cut, so the norm is in every update
    lr_decay_style="linear",  # a schedule that is not restored shows
    lr_decay_iters=20,
)
WITH_CRITIC: dict[str, Any] = dict(advantage_estimator="ppo", gamma=0.95, lambd=0.9, normalize_advantages=True)
KL_LOSS: dict[str, Any] = dict(use_kl_loss=True, kl_loss_coef=0.1)
ROUNDS: list[dict[str, Any]] = [
    dict(num_steps_per_rollout=2, max_tokens_per_gpu=90, balance_data=True, entropy_coef=0.01),
    dict(
        **dict(num_steps_per_rollout=2, micro_batch_size=3, advantage_estimator="gspo", opsm={"opsm_delta": 0.05}),
        **dict(
            use_tis=True, tis_level="sequence", tis_clip_low=0.3, kl_loss_type="k3", use_unbiased_kl=True, **KL_LOSS
        ),
    ),
    dict(
        **dict(num_steps_per_rollout=1, max_tokens_per_gpu=90, advantage_estimator="reinforce_plus_plus_baseline"),
        **dict(normalize_advantages=True, calculate_per_token_loss=True, entropy_coef=0.01, eps_clip_c=3.0),
        **dict(use_tis=True, tis_level="geometric", tis_mode="mask", tis_clip=1.2, tis_clip_low=0.4),
        opd={"opd_teacher_load": "base", "opd_divergence": "jsd", "opd_top_k": 5, "opd_kl_coef": 3.0},
    ),
    dict(
        num_steps_per_rollout=1,
        micro_batch_size=4,
        log_probs_chunk_size=7,
        opd={"opd_teacher_load": "base", "opd_divergence": "reverse_kl", "opd_kl_coef": 3.0},
    ),
]


def config_of(model: str, rollout_id: int, case: Case) -> TrainConfig:
    """Return algorithm and batches of a round. The dense model has a critic, trained in the first and the last round,
    and a reference that is refreshed after the first."""
    chosen = dict(ROUNDS[rollout_id])
    if "advantage_estimator" not in chosen:
        chosen |= WITH_CRITIC | {"kl_coef": 0.05} if model == "dense" else KL_LOSS | {"kl_loss_type": "low_var_kl"}
    layout = case.layout
    return TrainConfig(
        **OPTIMIZER | chosen,
        megatron=case.megatron,
        params_dtype="fp32",
        deterministic_mode=torch.cuda.is_available(),  # a CPU always is
        use_routing_replay=model != "dense" and rollout_id == 1,
        actor_num_gpus_per_node=dist.get_world_size(),
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline,
        sequence_parallel=layout.sequence_parallel,
    )


def rollout(rollout_id: int) -> Batch:
    """Return groups of 1, 4 and 7 samples with siblings, holes in masks, a masked and a failed sample, and one longer
    than a micro-batch."""
    rows = samples(rollout_id, 12)
    for index, row in enumerate(rows):
        row.group_id = f"{rollout_id}-{(index > 0) + (index > 4)}"
    rows[3].loss_mask = [0] * len(rows[3].loss_mask)
    for name in ("token_ids", "loss_mask", "rollout_logprobs"):
        setattr(rows[8], name, getattr(rows[8], name) * 6)
    return Batch.from_table(to_table(rows), needs_rewards=True)


class Trainer:
    """Models under a layout, and the results of their rounds."""

    def __init__(self, model: str, case: Case, base: Path) -> None:
        self.model, self.case = model, case
        config = config_of(model, 0, case)
        self.models = build_models(MODELS[model], config)
        load_auxiliary_model(self.models, "reference", base)
        load_auxiliary_model(self.models, "teacher", base)
        load_initial(self.models, base)
        engines = {"policy": self.models.policy, "critic": self.models.critic}
        self.engines: dict[str, Any] = {name: engine for name, engine in engines.items() if engine is not None}
        self.gradients: dict[str, Tensor] = {}
        for name, engine in self.engines.items():
            engine.optimizer_step = self._watched(name, engine, engine.optimizer_step)

    def _watched(self, name: str, engine: Any, step: Any) -> Any:
        """Return a step that first stores the gradients, if they are the first ones of this model in the round."""

        def watched() -> tuple[bool, float]:
            if not any(key.startswith(name) for key in self.gradients):
                self.gradients |= {f"{name}.{key}": gradient for key, gradient in gradients_of(engine).items()}
            return step()

        return watched

    def train(self, rollout_id: int) -> dict[str, Any]:
        """Return metrics of the round and of its steps, gradients of its first step, and the weights after it."""
        from penstock.stages.train.step import train_rollout

        config = config_of(self.model, rollout_id, self.case)
        self.gradients = {}
        models = self.models if config.uses_critic else replace(self.models, critic=None)
        if not config.uses_reference:
            models = replace(models, reference=None)
        trained = train_rollout(models, rollout(rollout_id), config, temperature=TEMPERATURE, keep_tokens=True)
        metrics = (
            {k: v for k, v in of.items() if not k.startswith("perf/")} for of in (trained.metrics, *trained.steps)
        )
        return {
            "metrics": list(metrics),
            "gradients": self.gradients,
            "weights": self.weights(),
            "tokens": {"logprobs": trained.tokens["trainer_logprobs"], "advantages": trained.estimate.advantages},
        }

    def weights(self) -> dict[str, Tensor]:
        return {
            f"{name}.{key}": tensor.clone()
            for name, engine in self.engines.items()
            for key, tensor in engine.gather_weights().tensors
        }

    def save(self, directory: Path) -> None:
        """Save after the first round."""
        if self.model == "dense":
            self.models.refresh_reference()
        save_models(self.models, directory, {"version": 1})

    def go_on(self, directory: Path) -> None:
        assert resume_models(self.models, directory) == {"version": 1}

    def digests(self) -> tuple[dict[str, str], dict[str, str]]:
        return self.models.digest(), self.models.optimizer_state_digest()


def gradients_of(engine: Any) -> dict[str, Tensor]:
    """Return full gradients under global names."""
    with engine.using_weights(engine.snapshot_weights()), torch.no_grad():
        replace_by_gradients(engine, [param for chunk in engine.chunks for param in chunk.parameters()])
        return {
            name: tensor.clone() for name, tensor in engine.gather_weights().tensors if not name.endswith("expert_bias")
        }


# ---- references ------------------------------------------------------------------------------------------------------


def prepare(directory: Path, model: str) -> None:
    """Save a base model, and the results of training it on one rank."""
    save_base(directory / f"{model}-base", model)
    trainer = Trainer(model, ALONE, directory / f"{model}-base")
    rounds, start = [], trainer.weights()
    moved = dict.fromkeys(start, 0.0)  # how far a tensor's weights have come
    for rollout_id in range(len(ROUNDS)):
        found = trainer.train(rollout_id)
        moved = {name: max(moved[name], largest(tensor - start[name])) for name, tensor in found["weights"].items()}
        rounds.append(found | {"moved": moved})
        if rollout_id == 0:
            trainer.save(directory / f"{model}-alone")
    check_rounds(rounds)
    torch.save(rounds, directory / f"{model}.pt")


def save_base(directory: Path, model: str) -> None:
    """Save random weights, in which norms, biases and the routers' corrections are random too."""
    from penstock.engines.megatron.weights import local_parameters

    options = config_of(model, 0, ALONE).optimizer_options
    engine = make_engine(MODELS[model], {"init_method_std": 0.12}, optimizer=options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for _, tensor in local_parameters(engine.chunks[0]):
            if tensor.ndim == 1:
                tensor.add_(0.2 * torch.randn(tensor.shape, generator=generator).to(tensor.device))
    engine.save(directory, None)


def check_rounds(rounds: list[dict[str, Any]]) -> None:
    """Check that the reference can show differences: every gradient is clipped, and every weight changes."""
    for number, found in enumerate(rounds):
        norms = [step["train/grad_norm"] for step in found["metrics"]]
        assert min(norms) > OPTIMIZER["clip_grad"], f"round {number}: gradients of {norms} are not clipped"
        still = [name for name in found["gradients"] if found["moved"][name] == 0]
        assert not still, f"round {number} does not train {still}"
        assert not any(size for name, size in found["moved"].items() if name.endswith("expert_bias")), (
            "a frozen correction moved"
        )


def largest(tensor: Tensor) -> float:
    return tensor.abs().max().item()


@cache
def reference_of(directory: Path, model: str) -> list[dict[str, Any]]:
    return torch.load(directory / f"{model}.pt", map_location=device())


def compare(found: dict[str, Any], expected: dict[str, Any], what: str) -> float:
    """Raise if a difference is too large; return the largest one relative to its tolerance."""
    for ours, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        assert ours.keys() == theirs.keys(), f"{what}: metrics {ours.keys() ^ theirs.keys()}"
        wrong = {name: (ours[name], theirs[name]) for name in ours if not close(ours[name], theirs[name])}
        assert not wrong, f"{what}: (found, expected) {wrong}"
    first = found["metrics"][1]
    exact = 1e-6 if torch.cuda.is_available() else 0.0  # fused kernels are compiled apart for passes without gradients
    assert abs(first.get("train/ppo_kl", 0.0)) <= exact, (
        f"{what}: a forward-only pass computes other bits: {first['train/ppo_kl']}"
    )
    moved, weights = expected["moved"], expected["weights"]
    allowed = {
        "gradients": {name: TOLERANCE * (largest(tensor) or 1) for name, tensor in expected["gradients"].items()},
        "weights": {name: TOLERANCE * moved[name] + ROUNDING * largest(tensor) for name, tensor in weights.items()},
        "tokens": {name: TOLERANCE * (largest(tensor) or 1) for name, tensor in expected["tokens"].items()},
    }
    worst = 0.0
    for kind, limits in allowed.items():
        ours, theirs = found[kind], expected[kind]
        assert ours.keys() == theirs.keys(), f"{what}: {kind} of {ours.keys() ^ theirs.keys()}"
        errors = [(largest(ours[name] - theirs[name]) / limit, name) for name, limit in limits.items()]
        worst = max(worst, max(errors)[0])
        assert worst <= 1, f"{what}: {kind} differ, times the tolerance: {sorted(errors)[-4:]}"
    return worst


def close(found: float, expected: float) -> bool:
    return abs(found - expected) <= max(TOLERANCE * abs(expected), VANISHING)


# ---- the cases -------------------------------------------------------------------------------------------------------


def run_case(directory: Path, name: str, case: Case, previous: dict[str, Path]) -> None:
    """Replace `previous`, the files that the layout before saved of each model after round 0, by this layout's."""
    for model in case.models:
        expected, what, others = reference_of(directory, model), f"{model} under {name}", previous[model]
        trainer = Trainer(model, case, directory / f"{model}-base")
        worst = [compare(trainer.train(0), expected[0], f"{what}, round 0")]
        saved = directory / f"{model}-{name}"
        trainer.save(saved)
        digests = trainer.digests()
        trainer.go_on(others)
        for number in range(1, len(ROUNDS)):
            worst.append(
                compare(trainer.train(number), expected[number], f"{what}, after loading {others.name}, round {number}")
            )
        assert trainer.digests() != digests
        trainer.go_on(saved)
        assert trainer.digests() == digests, f"{what}: loading its own files gives other bits"
        previous[model] = saved
        if dist.get_rank() == 0:
            print(f"{what}: differences " + " ".join(f"{x:.2f}" for x in worst), flush=True)


def select_cases(num_ranks: int, pair: int, selection: str) -> dict[str, Case]:
    """Return the cases of two ranks that a pair of processes runs."""
    cases = TWO_RANKS[pair] if num_ranks == 4 else TWO_RANKS[0] | TWO_RANKS[1]
    if selection == "some":
        return {name: replace(cases[name], models=models) for name, models in SOME.items()}
    return (ON_GPUS if torch.cuda.is_available() else {}) | cases


def run_rank(rank: int, num_ranks: int, directory: Path, selection: str) -> None:
    torch.set_num_threads(1)
    init_parallel(0, 1, f"file://{directory}/meet-{rank}")
    for model in ALL[rank::num_ranks]:
        prepare(directory, model)
    shutdown_parallel()

    previous = {model: directory / f"{model}-alone" for model in ALL}
    for name, case in FOUR_RANKS.items() if num_ranks == 4 else ():
        init_parallel(rank, num_ranks, f"file://{directory}/meet-{name}", case.layout)
        run_case(directory, name, case, previous)
        shutdown_parallel()
    pair, place = divmod(rank, 2)
    for name, case in select_cases(num_ranks, pair, selection).items():
        init_parallel(place, 2, f"file://{directory}/meet-{name}", case.layout)
        run_case(directory, name, case, previous)
        shutdown_parallel()
    if place == 0:
        init_parallel(0, 1, f"file://{directory}/meet-again-{rank}")
        for model in ALL:
            trainer = Trainer(model, ALONE, directory / f"{model}-base")
            trainer.go_on(previous[model])
            compare(
                trainer.train(1),
                reference_of(directory, model)[1],
                f"{model}, one rank after loading {previous[model].name}",
            )
        shutdown_parallel()


def guarded(rank: int, num_ranks: int, directory: Path, selection: str) -> None:
    try:
        run_rank(rank, num_ranks, directory, selection)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a world that has lost a rank waits for ever in its destructors


def main(directory: Path, num_ranks: int = 4, selection: str = "all") -> int:
    """Import once, then fork; the first rank that fails ends the others."""
    context = multiprocessing.get_context(
        "spawn" if torch.cuda.is_available() else "fork"
    )  # importing Megatron begins to use a GPU
    if context.get_start_method() == "fork":
        import penstock.stages.train.step  # noqa: F401

        gc.freeze()  # Megatron collects garbage at every save and load
    start = time.monotonic()
    ranks = [context.Process(target=guarded, args=(rank, num_ranks, directory, selection)) for rank in range(num_ranks)]
    for process in ranks:
        process.start()
    while alive := [process.sentinel for process in ranks if process.is_alive()]:
        multiprocessing.connection.wait(alive)
        if any(process.exitcode for process in ranks):
            break
    for process in ranks:
        process.kill()
        process.join()
    print(f"{time.monotonic() - start:.0f} s")
    return int(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *map(int, sys.argv[2:3]), *sys.argv[3:]))
