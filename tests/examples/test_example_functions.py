"""The functions of the examples without an engine, and their recipes."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from aiohttp import web
from torch import Tensor

from penstock.flows.cli import main
from penstock.flows.config import read_toml, validate_config
from penstock.stages.plugins import load_function
from penstock.stages.train.algorithms.experience import TokenFields
from penstock.stages.train.algorithms.losses import custom_loss
from penstock.storage.samples.sample import Sample
from tests.engines.test_vision_shapes import qwen2_5
from tests.train.ragged import options, sums
from tests.train.test_policy_losses import made_up, naive_policy_loss, tensors

EXAMPLES = Path(__file__).parents[2] / "examples"


def module(name: str, function: str) -> dict[str, Any]:
    """The globals of an example's module."""
    return load_function(f"{EXAMPLES / name}:{function}").__globals__


@pytest.mark.parametrize(
    "recipe", sorted(EXAMPLES.glob("*/*.toml")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_recipe_is_valid_and_its_readme_names_it(recipe: Path) -> None:
    values = read_toml(recipe)
    if recipe.parent.name == "on_policy_distillation":
        values["train"]["opd"]["opd_teacher_load"] = "given by the user"
    config = validate_config(values)
    assert config.run.run == config.convert.hf_checkpoint == ""  # the user gives them
    assert f"examples/{recipe.parent.name}/{recipe.name}" in (recipe.parent / "README.md").read_text(encoding="utf-8")


def test_every_example_is_listed() -> None:
    names = {path.parent.name for path in EXAMPLES.glob("*/README.md")}
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert names == set(re.findall(r"^\| \[(\w+)\]", listed, re.MULTILINE))


class TestSearch:
    functions = module("search/generate.py", "generate")

    def test_turn_is_answered_with_documents_hint_or_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        observe = self.functions["observe"]
        monkeypatch.setenv("SEARCH_TOPK", "2")
        assert asyncio.run(observe("<search>Capital of Kenya</search>")) == (
            "\n\n<information>Doc 1(Title: kenya) its capital is nairobi.\n"
            "Doc 2(Title: france) its capital is paris.</information>\n\n"
        )
        assert asyncio.run(observe("<search>zzz</search>")) == "\n\n<information></information>\n\n"
        assert asyncio.run(observe("it is <answer>paris</answer>")) is None
        assert asyncio.run(observe("paris")) == self.functions["HINT"]

    def test_retrieval_server_is_asked_with_the_protocol_of_search_r1(self, monkeypatch: pytest.MonkeyPatch) -> None:
        requests = []

        async def retrieve(request: web.Request) -> web.Response:
            requests.append(await request.json())
            document = {"id": "7", "contents": '"Old Town"\nIt is old.\nVery old.'}
            return web.json_response({"result": [[{"document": document, "score": 2.5}]]})

        async def ask() -> str:
            app = web.Application()
            app.router.add_post("/retrieve", retrieve)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            monkeypatch.setenv("SEARCH_URL", f"http://127.0.0.1:{runner.addresses[0][1]}/retrieve")
            observation = await self.functions["observe"]("<search> old </search>")
            await runner.cleanup()
            return observation

        answer = asyncio.run(ask())
        assert answer == "\n\n<information>Doc 1(Title: Old Town) It is old.\nVery old.</information>\n\n"
        assert requests == [{"queries": ["old"], "topk": 3, "return_scores": True}]

    @pytest.mark.parametrize(
        ("label", "response", "reward"),
        [
            ("Rome", "<answer>paris</answer> <answer> The rome. </answer>", 1.0),
            ("Rome", "<answer>rome</answer><answer>paris</answer>", 0.0),
            ('["NYC", "New York"]', "<answer>new york</answer>", 1.0),
            (
                '{"ground_truth": {"target": ["1,000", "a thousand"]}, "style": "rule"}',
                "<answer>Thousand</answer>",
                1.0,
            ),
            ('{"ground_truth": {"target": "1969"}}', "<answer>1969</answer>", 1.0),
            ("12", "<answer>2</answer>", 0.0),
        ],
    )
    def test_exact_match_with_any_right_answer(self, label: str, response: str, reward: float) -> None:
        assert self.functions["reward_func"](None, Sample("s", "g", "s", 0, label=label, response=response)) == reward


class Conversation:
    """A conversation with scripted replies of the model."""

    def __init__(self, sample: SimpleNamespace, replies: list[str | tuple[str, str]]) -> None:
        self.sample, self.replies, self.heard = sample, replies, []

    async def reply(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        self.heard += [(message["role"], message["content"]) for message in messages]
        if not self.replies:
            self.sample.status = "truncated"
            return {"content": ""}
        reply = self.replies.pop(0)
        if isinstance(reply, str):
            return {"content": reply}
        function = {"name": reply[0], "arguments": reply[1]}
        return {"content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]}


class TestCustomer:
    functions = module("customer/generate.py", "generate")

    def talk(self, wish: dict[str, Any], replies: list[str | tuple[str, str]]) -> tuple[float, list[tuple[str, str]]]:
        """The reward of a conversation, and what the model has read."""
        status = SimpleNamespace(COMPLETED="completed")
        sample = SimpleNamespace(prompt="be kind", metadata={"wish": wish}, status="completed", Status=status)
        conversation = Conversation(sample, replies)
        engine = SimpleNamespace(conversation=lambda sample, tools: conversation)
        asyncio.run(self.functions["generate"](SimpleNamespace(max_turns=6), sample, {}, engine))
        return sample.reward, conversation.heard

    def test_vague_customer_gives_the_number_when_asked(self) -> None:
        calls: list[str | tuple[str, str]] = ["which one?", ("show", '{"order": "a1"}'), ("cancel", '{"order": "a1"}')]
        reward, heard = self.talk({"tool": "cancel", "order": "a1", "vague": True}, [*calls, "done"])
        assert reward == 1.0
        assert heard == [
            ("system", "be kind"),
            ("user", "please cancel my order"),
            ("user", "order a1"),
            ("tool", "lamp, pending"),
            ("tool", "lamp, cancelled"),
        ]

    @pytest.mark.parametrize(
        ("wish", "replies", "reward"),
        [
            (("refund", "b2"), [("refund", '{"order": "b2"}')], 1.0),
            (("refund", "b2"), [("refund", '{"order": "d4"}')], 0.0),  # another order
            (("refund", "b2"), ["no"], 0.0),
            (("refund", "c3"), ["no, it is on its way"], 1.0),  # the policy forbids it
            (("refund", "c3"), [("refund", '{"order": "c3"}')], 0.0),
            (("cancel", "d4"), [("show", '{"order": "d4"}'), "too late"], 1.0),
            (("cancel", "a1"), [("cancel", '{"order": "a1"}'), ("cancel", "{"), ("cancel", '{"order": ["a1"]}')], 1.0),
        ],
    )
    def test_reward_is_that_of_the_final_database(
        self, wish: tuple[str, str], replies: list[str | tuple[str, str]], reward: float
    ) -> None:
        assert self.talk({"tool": wish[0], "order": wish[1]}, replies)[0] == reward


def test_geometry_labels_equal_the_formulas_and_problems_are_trained_or_held_out() -> None:
    functions = module("geometry/data.py", "make_problems")
    rows = functions["make_problems"]()
    train, heldout = ([row["prompt"] for row in part] for part in functions["split_problems"](random.Random(0)))
    assert len(train) == 300 and len(heldout) == 42 and not set(train) & set(heldout)
    formulas = {
        "rectangle area": lambda a, b: a * b,
        "rectangle perimeter": lambda a, b: 2 * (a + b),
        "rectangle diagonal": math.hypot,
        "triangle area": lambda a, b: a * b / 2,
        "circle area": lambda r: math.pi * r * r,
        "circle perimeter": lambda r: 2 * math.pi * r,
    }
    assert len({row["prompt"] for row in rows}) == len(rows) == 342
    for row in rows:
        sides = [int(number) for number in re.findall(r"\d+", row["prompt"])]
        text = re.sub(r"(\d)(?=\\)", r"\1*", row["label"]).replace("\\pi", "math.pi").replace("\\sqrt{", "math.sqrt(")
        value = eval(text.replace("}", ")"), {"math": math})
        assert math.isclose(value, formulas[row["metadata"]["kind"]](*sides)), row
        wrong = row["metadata"]["mistake"] != row["label"]
        assert wrong == (row["metadata"]["kind"] == "triangle area")
    roots = {row["label"] for row in rows if "sqrt" in row["label"]}
    assert "2\\sqrt{5}" in roots and "\\sqrt{20}" not in roots


def test_right_answer_of_an_agent_is_its_last_number() -> None:
    is_right = module("multi_agent/generate.py", "generate")["is_right"]
    assert [is_right(text, "45") for text in ("40, no: 45", "45 40", "", "-45")] == [1.0, 0.0, 0.0, 0.0]


def test_distillation_reward_observes_only() -> None:
    reward = module("on_policy_distillation/reward.py", "reward_func")["reward_func"]
    graded = [reward(None, Sample("s", "g", "s", 0, label="7", response=text)) for text in ("7", "8")]
    assert graded == [{"reward": 0.0, "right": 1.0}, {"reward": 0.0, "right": 0.0}]


class TestGeometry3K:
    """The preparation of the data, and the turns of the environment."""

    functions = module("geometry3k/generate.py", "generate")

    def test_rows_of_the_data_set_become_prompts_with_images(self, tmp_path: Path) -> None:
        script = module("geometry3k/prepare.py", "prepare")
        image = {"bytes": b"png", "path": "img_diagram.png"}
        rows = [
            {"images": [image], "problem": "<image>Find x.", "answer": "2 \\sqrt { 221 }", "id": 1},
            {"images": [image, image], "problem": "Find y. ", "answer": "15", "id": 2},
        ]
        (tmp_path / "data").mkdir()
        with pytest.raises(SystemExit, match="train"):
            script["prepare"](tmp_path, tmp_path / "out")
        for split in ("train", "validation", "test"):
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"data/{split}-00000-of-00001.parquet")
        assert script["prepare"](tmp_path, tmp_path / "out") == {"train": 2, "test": 2}
        written = pq.read_table(tmp_path / "out/test.parquet").to_pylist()
        assert [row["prompt"].partition("\n")[0] for row in written] == ["<image>Find x.", "<image><image>Find y."]
        assert all(row["prompt"].endswith(script["INSTRUCTION"]) for row in written)
        assert [row["label"] for row in written] == ["2 \\sqrt { 221 }", "15"]
        assert [row["images"] for row in written] == [[image], [image, image]]

    @pytest.mark.parametrize(
        ("replies", "evaluation", "said"),
        [
            (["\\boxed{3}", "\\boxed{2\\sqrt{221}}"], False, ["WRONG"]),
            (
                ["it is 3", "\\boxed{3}", "\\boxed{4}"],
                False,
                ["WITHOUT_ANSWER", "WRONG"],
            ),  # the last turn is not answered
            (["\\boxed{3}"], True, []),
            ([], False, []),  # the length limit was reached
        ],
    )
    def test_wrong_answers_are_returned_until_the_last_turn(
        self, replies: list[str | tuple[str, str]], evaluation: bool, said: list[str]
    ) -> None:
        status = SimpleNamespace(COMPLETED="completed")
        sample = SimpleNamespace(label="2 \\sqrt { 221 }", status="completed", Status=status)
        conversation = Conversation(sample, replies)
        engine = SimpleNamespace(conversation=lambda sample: conversation)
        asyncio.run(self.functions["generate"](SimpleNamespace(max_turns=3), sample, {}, engine, evaluation))
        assert conversation.heard == [("user", self.functions[name]) for name in said] and not conversation.replies
        assert all("\\boxed" not in self.functions[name] for name in ("WRONG", "WITHOUT_ANSWER"))

    def test_recipes_of_the_3b_model_fit_one_gpu(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "config.json").write_text(json.dumps(qwen2_5(36, 2048, 11008, 16, 2, True)))
        files = [
            word for name in ("run", "multi_turn") for word in ("--config", str(EXAMPLES / f"geometry3k/{name}.toml"))
        ]
        words = [*files, "--hf-checkpoint", str(tmp_path)]
        assert main(["train", *words, "--run", "r", "--prompt-data", "/nowhere.parquet", "--dry-run"]) == 0
        assert "optimizer steps" in capsys.readouterr().out
        assert main(["doctor", "--plan", *words, "--gpu-memory-gib", "80"]) == 0
        output = capsys.readouterr().out
        assert "fits: a GPU shared by trainer and engines" in output and "warning" not in output


def naive_example_losses(
    name: str, new: list[float], at: list[float], known: dict[str, list[float]], lengths: list[int]
) -> list[float]:
    """Return the losses of the tokens; `new` is differentiated, `at` has the same numbers for detached terms."""
    n, starts = len(new), list(itertools.accumulate([0, *lengths]))
    sample_of = [i for i, length in enumerate(lengths) for _ in range(length)]
    advantages, mu = known["advantages"], known["rollout_logprobs"]
    ratios = [math.exp(x - o) for x, o in zip(new, known["old_logprobs"], strict=True)]
    gaps = [x - m for x, m in zip(at, mu, strict=True)]
    behaviour = [-math.exp(x - m) * a for x, m, a in zip(new, mu, advantages, strict=True)]
    mean_a, mean_x = sum(advantages) / n, sum(at) / n
    covariances = [(a - mean_a) * (x - mean_x) for a, x in zip(advantages, at, strict=True)]
    samples = [range(start, end) for start, end in itertools.pairwise(starts)]
    if name == "kl_cov":
        largest = max(range(n), key=lambda t: covariances[t])
        return [
            -r * a + abs(math.log(r)) * (t == largest) for t, (r, a) in enumerate(zip(ratios, advantages, strict=True))
        ]
    if name == "vespo":
        weights = [math.exp(sum(gaps[t] for t in sample)) for sample in samples]
        powers = [(2, 3) if a >= 0 else (3, 2) for a in advantages]
        return [
            -(weights[sample_of[t]] ** p) * math.exp(q * (1 - weights[sample_of[t]])) * advantages[t] * new[t]
            for t, (p, q) in enumerate(powers)
        ]
    if name == "luspo":
        means = [math.prod(ratios[t] for t in sample) ** (1 / max(len(sample), 1)) for sample in samples]
        per_token = [
            max(-means[i] * a, -min(max(means[i], 0.8), 1.2) * a) for i, a in zip(sample_of, advantages, strict=True)
        ]
        return [loss * lengths[i] for i, loss in zip(sample_of, per_token, strict=True)]
    if name == "trust_region_masking":
        kept = [all(gaps[t] ** 2 / 2 <= 0.05 for t in sample) for sample in samples]
        assert any(kept) and not all(kept)
        return [loss * kept[i] for i, loss in zip(sample_of, behaviour, strict=True)]
    assert name == "m2po"
    moving = sorted((t for t in range(n) if gaps[t] * advantages[t] > 0), key=lambda t: gaps[t] ** 2)
    num_moving = len(moving)
    while moving and sum(gaps[t] ** 2 for t in moving) / len(moving) > 0.04:
        moving.pop()
    assert 0 < len(moving) < num_moving
    return [loss * (t in moving or gaps[t] * advantages[t] <= 0) for t, loss in enumerate(behaviour)]


class TestPolicyLosses:
    functions = module("policy_losses/losses.py", "m2po")
    lengths = (3, 1, 6, 2, 4)

    def compute(
        self, name: str, new: list[float], known: dict[str, list[float]], **changed: Any
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the loss of each token, the gradient of the sum of (1 + t) x loss_t, and the metrics."""
        logprobs = torch.tensor(new, dtype=torch.float64, requires_grad=True)
        opts = options(custom_loss_function_path=f"{EXAMPLES}/policy_losses/losses.py:{name}", **changed)
        loss, metrics = custom_loss(logprobs, logprobs, tensors(known), sums(list(self.lengths)), opts)
        weights = torch.arange(1, len(new) + 1, dtype=torch.float64)
        return loss.detach(), torch.autograd.grad((weights * loss).sum(), logprobs)[0], metrics

    @pytest.mark.parametrize("name", ["kl_cov", "vespo", "luspo", "trust_region_masking", "m2po"])
    def test_loss_and_its_gradient_equal_a_plain_loop(self, name: str) -> None:
        for seed in range(3):
            new, known, _ = made_up(seed, list(self.lengths), spread=0.25)
            loss, gradient, _ = self.compute(name, new, known)
            expected = naive_example_losses(name, new, new, known, list(self.lengths))
            torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
            for t in range(len(new)):
                totals = []
                for step in (1e-6, -1e-6):
                    moved = [x + step * (i == t) for i, x in enumerate(new)]
                    losses = naive_example_losses(name, moved, new, known, list(self.lengths))
                    totals.append(sum((1 + i) * x for i, x in enumerate(losses)))
                assert gradient[t].item() == pytest.approx((totals[0] - totals[1]) / 2e-6, rel=1e-5, abs=1e-5)

    def test_clip_cov_drops_one_token_of_ppo_whose_covariance_is_within_the_bounds(self) -> None:
        new, known, _ = made_up(0)  # four tokens are within the bounds, of which PPO clips the second
        loss, gradient, metrics = self.compute("clip_cov", new, known)
        dropped = metrics["train/cov_clipfrac"].nonzero().flatten().tolist()
        advantages, at = known["advantages"], new
        mean_a, mean_x = sum(advantages) / len(new), sum(at) / len(new)
        covariances = [(a - mean_a) * (x - mean_x) for a, x in zip(advantages, at, strict=True)]
        ppo = naive_policy_loss(new, new, known, [0.0] * len(new), options(), list(self.lengths))
        assert len(dropped) == 1 and 1 < covariances[dropped[0]] < 5
        assert metrics["train/pg_clipfrac"][dropped[0]] == 0 and gradient[dropped[0]] == 0
        assert loss.tolist() == pytest.approx([x * (t not in dropped) for t, x in enumerate(ppo)], rel=1e-12)
        assert torch.equal(self.compute("clip_cov", new, known)[0], loss), "the choice is the same in a replay"

    @pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "vespo", "luspo", "trust_region_masking", "m2po"])
    @pytest.mark.parametrize("gap", [500.0, -500.0, 0.0])
    def test_limits_are_finite_and_a_micro_batch_may_be_empty(self, name: str, gap: float) -> None:
        new, known, _ = made_up(0, list(self.lengths))
        for field in ("old_logprobs", "rollout_logprobs"):
            known[field] = [x - gap for x in new]
        loss, gradient, metrics = self.compute(name, new, known)
        assert loss.isfinite().all() and gradient.isfinite().all()
        assert all(values.isfinite().all() for values in metrics.values())
        known["advantages"] = [0.0] * len(new)
        if name != "kl_cov":  # its penalty does not depend on the advantages
            assert not self.compute(name, new, known)[1].any()
        none = torch.zeros(0, requires_grad=True)
        fields = TokenFields(none.detach(), none.detach())
        self.functions[name](none, none, fields, sums([0]), options())[0].sum().backward()


def test_process_of_an_environment_answers_out_of_order_and_may_die(tmp_path: Path) -> None:
    program = tmp_path / "environment.py"
    program.write_text(
        "import json, sys\n"
        "requests = [json.loads(sys.stdin.readline()) for _ in range(3)]\n"
        "for request in requests[::-1][:2]:\n"
        "    error = 'no such example' if request['example'] == 2 else None\n"
        "    print(json.dumps({'id': request['id'], 'reward': request['example'], 'error': error}), flush=True)\n"
    )
    functions = module("verifiers/generate.py", "generate")

    async def run_three() -> list[Any]:
        environment = await functions["Environment"].start(sys.executable, program)
        results = await asyncio.gather(*(environment.run(example=n) for n in range(3)), return_exceptions=True)
        return [*results, *await asyncio.gather(environment.run(example=3), return_exceptions=True)]

    dead, answered, failed, late = asyncio.run(run_three())
    assert answered["reward"] == 1 and "no such example" in str(failed)
    assert "has ended" in str(dead) and "has ended" in str(late)
