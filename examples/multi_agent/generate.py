"""Generate with three agents that are the same model: a solver, a critic and a rewriter.
`--custom-generate-function-path examples/multi_agent/generate.py`

One execution gives three samples with one trajectory_id: the solver's draft, the critic's opinion on it, and the
rewriter's answer after reading both. Each is trained on its own tokens; all of them get the reward of the final answer,
because a draft or an opinion is good if it leads to a right answer.
"""

import copy
import re

CRITIC = "{question}{draft}?"  # for a chat model: instructions instead of these symbols (see the README)
REWRITER = "{question}{draft}?{opinion}:"
OPINION_TOKENS = 2


async def generate(args, sample, sampling_params, engine):
    question = sample.prompt
    solver, critic, rewriter = (copy.deepcopy(sample) for _ in range(3))
    draft = await ask(engine, solver, question)
    opinion = await ask(engine, critic, CRITIC.format(question=question, draft=draft), max_new_tokens=OPINION_TOKENS)
    answer = await ask(engine, rewriter, REWRITER.format(question=question, draft=draft, opinion=opinion))
    for role, part in (("solver", solver), ("critic", critic), ("rewriter", rewriter)):
        part.reward = {"answer": is_right(answer, sample.label), "draft": is_right(draft, sample.label)}
        part.metadata["role"] = role
    return [solver, critic, rewriter]


async def ask(engine, sample, message: str, **sampling) -> str:
    """Return the model's reply to a message, which becomes the prompt of the sample."""
    reply = await engine.conversation(sample).reply([{"role": "user", "content": message}], **sampling)
    return reply["content"]


def is_right(answer: str, label: str) -> float:
    """Return 1 if the last integer of the answer is the label, else 0."""
    numbers = re.findall(r"-?\d+", answer)
    return float(bool(numbers) and numbers[-1] == label)
