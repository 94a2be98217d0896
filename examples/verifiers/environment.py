"""An environment of the `verifiers` package, and a program that runs its rollouts for other processes. It does not
depend on Penstock and runs in a virtual environment of its own, because verifiers needs a newer `openai` than SGLang.

    python environment.py rows     print the prompts as JSONL for --prompt-data
    python environment.py serve    read {"id", "example", "base_url", "api_key"} from stdin, one per line, and print
                                   {"id", "reward", "metrics", "error"} when a rollout is finished

The environment is an ordinary one: replace `load_environment` by that of an installed environment.
"""

import asyncio
import json
import re
import sys

import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI


class Arithmetic(vf.MultiTurnEnv):
    """Sums and differences, with a second try after a wrong answer."""

    async def env_response(self, messages, state, **kwargs):
        return [vf.UserMessage(role="user", content=f"no. {state['prompt'][-1].content}")]

    @vf.stop
    async def is_right(self, state) -> bool:
        return bool(state["trajectory"]) and number_of(state["trajectory"][-1]["completion"]) == state["answer"]


def number_of(messages) -> str:
    """Return the last integer of the last message as text."""
    return (re.findall(r"-?\d+", messages[-1].content or "") or [""])[-1]


async def first_or_second_try(completion, answer, state) -> float:
    """Return 1 for a right first answer, 0.5 for a right second one, else 0."""
    return float(number_of(completion) == answer) / max(len(state["trajectory"]), 1)


def load_environment() -> vf.Environment:
    """Return the environment with 1,955 problems."""
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(100) for b in range(10)]
    rows += [{"question": f"{a}-{b}=", "answer": str(a - b)} for a in range(100) for b in range(10) if b <= a]
    return Arithmetic(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[first_or_second_try]), max_turns=2)


def print_rows() -> None:
    """Print one row of prompt data per example; the metadata names the example."""
    for number, row in enumerate(load_environment().get_dataset()):
        print(json.dumps({"prompt": row["prompt"][-1]["content"], "metadata": {"example": number}}))


async def run(environment: vf.Environment, rows: list[dict], request: dict) -> None:
    """Run one rollout with the model at the request's address, and print its result."""
    try:
        async with AsyncOpenAI(base_url=request["base_url"], api_key=request["api_key"], max_retries=0) as openai:
            client = vf.clients.OpenAIChatCompletionsClient(openai)
            output = await environment.run_rollout(rows[request["example"]], client, "policy", sampling_args={})
        error = output.get("error")
        if error and error["error"] == vf.EmptyModelResponseError.__name__:
            error = None  # an empty answer is not a failure: it gets reward 0
        result = {"reward": output["reward"], "metrics": output["metrics"], "error": error and error["error_chain_str"]}
    except Exception as error:  # other rollouts continue
        result = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"id": request["id"], **result}), flush=True)


async def serve() -> None:
    """Run rollouts until stdin is closed."""
    environment = load_environment()
    rows = list(environment.get_dataset())
    loop, running = asyncio.get_running_loop(), set()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        task = loop.create_task(run(environment, rows, json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)


if __name__ == "__main__":
    print_rows() if sys.argv[1] == "rows" else asyncio.run(serve())
