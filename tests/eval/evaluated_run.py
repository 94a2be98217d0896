"""Make runs with rounds and evaluations of given responses: real data source, shards and commits, no engine."""

import json
from pathlib import Path

from penstock.flows.config import PostTrainConfig
from penstock.flows.options.flags import parse_config
from penstock.flows.runtime.resolve import resolve
from penstock.flows.runtime.runs import open_run
from penstock.stages.eval.scores import compute_eval_metrics
from penstock.stages.rewards.grading import Grader
from penstock.stages.rewards.hub import RewardSettings
from penstock.stages.rollout.prompts.source import Prompt, PromptSource
from penstock.storage.commit import CheckpointRef, Commit, RunKeys, commit_key
from penstock.storage.samples.sample import Sample, Status
from penstock.storage.samples.shards import encode_runs, write_shards
from penstock.storage.store import Store

LIMIT = 8  # tokens of a response


def write_sums(path: Path, rows: int = 4) -> Path:
    path.write_text(
        "".join(json.dumps({"input": f"{row} + {row} =", "label": str(2 * row)}) + "\n" for row in range(rows))
    )
    return path


def config_of(store: Store, data: Path, run: str, *words: str) -> PostTrainConfig:
    where = ["--run", run, "--store", store.root, "--hf-checkpoint", "model", "--eval-prompt-data", "sums", str(data)]
    return parse_config(
        [*where, "--label-key", "label", "--rm-type", "exact_number", "--rollout-max-response-len", str(LIMIT), *words]
    )


def open_with_model(store: Store, config: PostTrainConfig, flow: str) -> RunKeys:
    keys = open_run(store, resolve(flow, config, store))
    if not store.exists(keys.origin_key("base")):
        store.commit("models/abc", Commit(kind="model", policy_version=0))
        base = CheckpointRef(key="models/abc.commit.json", uri="", format="torch_dist", policy_version=0)
        store.create(keys.origin_key("base"), base.model_dump_json().encode())
    return keys


def train_rounds(store: Store, config: PostTrainConfig, rounds: list[list[list[str]]], flow: str = "train") -> RunKeys:
    """Commit rollouts with responses per round and prompt ("" and "?": see `evaluate`), and the steps on them."""
    keys, state, source = open_with_model(store, config, flow), None, PromptSource.open(config.rollout)
    for r, responses in enumerate(rounds):
        prompts, after = source.take(source.restore(state), len(responses))
        state = after.model_dump(mode="json")
        commit_round(store, keys, r, graded_samples(prompts, responses, r), state)
    return keys


def graded_samples(prompts: list[Prompt], responses: list[list[str]], version: int, prefix: str = "") -> list[Sample]:
    samples = [
        sample_of(
            f"{prefix}{prompt.issue:09d}",
            index,
            version,
            prompt.label,
            response,
            (prompt.epoch, prompt.file, prompt.row),
        )
        for prompt, of_prompt in zip(prompts, responses, strict=True)
        for index, response in enumerate(of_prompt)
    ]
    with Grader(RewardSettings("exact_number")) as grader:
        grader.grade([sample for sample in samples if sample.status is not Status.FAILED])
    return samples


def commit_round(store: Store, keys: RunKeys, r: int, samples: list[Sample], state: dict[str, object]) -> None:
    prefix = keys.rollout_prefix(r)
    attempt = store.new_attempt(prefix)
    with store.writing(attempt) as out:
        write_shards(out.path, samples)
    fields = {"kind": "rollout", "run": keys.run, "index": r, "policy_version": r, "state": {"data_source": state}}
    store.commit(prefix, Commit(attempt=attempt, files=out.files, **fields))
    step = Commit(kind="step", run=keys.run, index=r, policy_version=r + 1, inputs={"rollout": commit_key(prefix)})
    is_trained = [sample.reward is not None and any(sample.loss_mask) for sample in samples]
    step.state = {"sample_uses": encode_runs(is_trained)}
    store.commit(keys.step_prefix(r), step)


def evaluate(
    store: Store,
    config: PostTrainConfig,
    version: int,
    responses: list[list[str]],
    name: str = "sums",
    flow: str = "evaluate",
) -> Commit:
    """Commit an evaluation with `responses` per prompt, graded by the config. "" stands for a failed generation, "?"
    for a failed grader."""
    keys = open_with_model(store, config, flow)
    path = dict(config.eval.data_sets)[name]
    source = PromptSource.open(config.rollout.model_copy(update=config.eval.rollout_overrides(path, name)))
    prompts, after = source.take(source.restore(None), len(source))
    samples = graded_samples(prompts, responses, version, f"eval-{version:06d}-{name}-")
    attempt = store.new_attempt(keys.eval_prefix(version, name))
    with store.writing(attempt) as out:
        write_shards(out.path, samples)
    commit = Commit(
        kind="eval", run=keys.run, index=version, policy_version=version, attempt=attempt, files=out.files,
        inputs={"prompt_data/0": path}, summary=compute_eval_metrics(samples, name),
        state={"data_source": after.model_dump(mode="json")},
    )  # fmt: skip
    return store.commit(keys.eval_prefix(version, name), commit)


def sample_of(group: str, index: int, version: int, label: str, response: str, where: tuple[int, int, int]) -> Sample:
    tokens = [] if response == "" else [1] * (LIMIT if "..." in response else 2)
    failed = response == "" or response.startswith("?")
    metadata = {"source": dict(zip(("epoch", "file", "row"), where))} | ({"error": "why"} if failed else {})
    return Sample(
        f"{group}-{index:02d}", group, f"{group}-{index:02d}", version, response=response, label=label,
        token_ids=[5, *tokens], loss_mask=[0] + [1] * len(tokens), rollout_logprobs=[0.0] * (1 + len(tokens)),
        status=Status.FAILED if failed else Status.TRUNCATED if "..." in response else Status.COMPLETED,
        policy_versions=(version, version), metadata=metadata,
    )  # fmt: skip
