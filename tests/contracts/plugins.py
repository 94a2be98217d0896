"""Functions of every kind: those that Penstock brings along, good ones as people write them, and bad ones with what
must be said of them."""

from __future__ import annotations

from pathlib import Path

HERE = "tests.contracts.plugins"
EXAMPLES = Path(__file__).parents[2] / "examples"


async def reward(args, sample, **kwargs):
    return float(sample.label in sample.response)


def group_reward(args, samples, **kwargs):
    shortest = min(len(sample.response) for sample in samples)
    return [float(len(sample.response) == shortest) for sample in samples]


class Model:
    def compute_reward(self, prompts, responses):
        return [len(response) / 100 for response in responses]


async def generate(args, sample, sampling_params, engine):
    for _ in range(args.max_turns):
        await engine.generate(sample)
        if not engine.append(sample, "+1="):
            break
    return sample


async def generate_list(args, samples, evaluation=False):
    for sample in samples:
        await args.engine.generate(sample)
    return samples


def short_enough(args, samples):
    return all(len(sample.response) < args.rollout_max_response_len for sample in samples)


def note_length(args, sample):
    sample.metadata["length"] = sample.response_length


def remove_truncated(args, groups):
    for group in groups:
        for sample in group:
            sample.remove_sample = sample.status == sample.Status.TRUNCATED


def count(args, groups, data_source):
    return sum(map(len, groups))


def last_in_first_out(args, rollout_id, buffer, num_samples):
    return buffer[-num_samples:]


class Source:
    def get_samples(self, num_samples):
        return self.dataset.sample(num_samples)

    def add_samples(self, samples):
        pass


def advantages(experience, options):
    return experience.rewards.nan_to_num()[experience.sample_index]


def loss(logprobs, entropy, fields, samples, options):
    return -fields.advantages * logprobs, {"mine": samples.mean(logprobs.detach())}


def correction(old_logprobs, rollout_logprobs, samples, options):
    return (old_logprobs - rollout_logprobs).exp(), None, {}


def weights(trajectory_index, sample_index, num_trajectories):
    return 1.0 / (1.0 + trajectory_index)


GOOD = [
    *(
        (kind, f"{HERE}:{kind}")
        for kind in ("reward", "group_reward", "generate", "advantages", "loss", "correction", "weights")
    ),
    ("reward", f"{HERE}:Model"),
    ("generate", f"{HERE}:generate_list"),
    *(("generate", str(EXAMPLES / name / "generate.py")) for name in ("multi_turn_tool", "search", "openai_agent")),
    ("reward", str(EXAMPLES / "custom_reward" / "reward.py")),
    ("filter", "penstock.stages.rollout.plugins.filters:check_reward_nonzero_std"),
    ("filter", f"{HERE}:short_enough"),
    ("sample_hook", f"{HERE}:note_length"),
    ("sample_filter", f"{HERE}:remove_truncated"),
    ("all_samples", f"{HERE}:count"),
    ("buffer_filter", f"{HERE}:last_in_first_out"),
    ("data_source", f"{HERE}:Source"),
    ("data_source", "penstock.stages.rollout.prompts.data_source:RolloutDataSource"),
    ("data_source", "penstock.stages.rollout.prompts.data_source:RolloutDataSourceWithBuffer"),
]


def wrong_signature(only):
    return only


def raising(*args, **kwargs):
    raise KeyError("no such thing")


def returns_text(*args, **kwargs):
    return "good"


async def not_finite(args, sample):
    return float("nan")


async def raising_generate(args, sample, sampling_params):
    return {}["no such thing"]


async def too_short_mask(args, sample, sampling_params, engine):
    await engine.generate(sample)
    sample.loss_mask = [1]
    return sample


async def made_up_logprobs(args, sample, sampling_params, engine):
    await engine.generate(sample)
    sample.rollout_log_probs = [-0.5] * sample.response_length
    return sample


async def writes_nothing(args, sample, sampling_params):
    return sample


moods = [True]


def moody(args, samples):
    moods.append(not moods[-1])
    return moods[-1]


def unwritable(args, sample):
    sample.metadata["lock"] = object()


def drops_from_the_list(args, groups):
    if groups:
        groups.pop()


def strangers(args, buffer, num_samples):
    return [object()]


class Forgetful:
    place = 0

    def get_samples(self, num_samples):
        Forgetful.place += num_samples
        return self.dataset.sample(num_samples + Forgetful.place)[-num_samples:]


def not_finite_advantages(experience, options):
    return experience.rewards[experience.sample_index] / 0.0


def not_finite_weights(trajectory_index, sample_index, num_trajectories):
    return trajectory_index / 0.0


BAD = [
    ("reward", "wrong_signature", "signature"),
    ("reward", "not_finite", "finite number"),
    ("generate", "raising_generate", "KeyError"),
    ("generate", "too_short_mask", "loss_mask has 1 entries"),
    ("generate", "made_up_logprobs", "has not returned"),
    ("generate", "writes_nothing", "no response tokens"),
    ("filter", "wrong_signature", "signature"),
    ("filter", "raising", "KeyError"),
    ("filter", "returns_text", "returned 'good'"),
    ("filter", "moody", "differently"),
    ("sample_hook", "unwritable", "JSON"),
    ("sample_filter", "drops_from_the_list", "remove_sample"),
    ("buffer_filter", "wrong_signature", "buffer"),
    ("buffer_filter", "strangers", "elements of the buffer"),
    ("data_source", "Forgetful", "state_dict"),
    ("data_source", "wrong_signature", "class"),
    ("advantages", "not_finite_advantages", "finite advantage"),
    ("weights", "not_finite_weights", "finite number for each"),
    ("loss", "missing", "no function 'missing'"),
]
