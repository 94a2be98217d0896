"""The functions of the examples without an engine, and their recipes."""

from __future__ import annotations

import asyncio
import math
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from penstock.flows.config import read_toml, validate_config
from penstock.stages.plugins import load_function
from penstock.storage.samples.sample import Sample

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
            ("Rome", "rome", 0.0),
            ('["NYC", "New York"]', "<answer>new york</answer>", 1.0),
            (
                '{"ground_truth": {"target": ["1,000", "a thousand"]}, "style": "rule"}',
                "<answer>Thousand</answer>",
                1.0,
            ),
            ('{"ground_truth": {"target": "1969"}}', "<answer>1969</answer>", 1.0),
            ("12", "<answer>12</answer>", 1.0),
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
            (("refund", "b2"), [("cancel", '{"order": "b2"}')], 0.0),
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


def test_geometry_labels_equal_the_formulas() -> None:
    rows = module("geometry/data.py", "make_problems")["make_problems"]()
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


def test_geometry_problems_are_either_trained_or_held_out() -> None:
    split = module("geometry/data.py", "make_problems")["split_problems"]
    train, heldout = ([row["prompt"] for row in rows] for rows in split(random.Random(0)))
    assert len(train) == 300 and len(heldout) == 42 and not set(train) & set(heldout)


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
