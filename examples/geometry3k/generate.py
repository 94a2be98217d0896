"""Let the model correct a wrong answer: `--custom-generate-function-path examples/geometry3k/generate.py`.

After each answer, a message of the environment says what is wrong with it, until the answer is right or the model has
had `max_turns` turns. Only the tokens of the model are trained on. `--rm-type math` then grades the last `\\boxed{}`
of the whole response: therefore the messages of the environment have none. An evaluation has one turn.
"""

import asyncio

from penstock.stages.rewards.builtin import grade_math, last_boxed

WITHOUT_ANSWER = "Your reply has no boxed answer. Look at the figure again, and write the final answer in a box."
WRONG = "Your answer is wrong. Look at the figure again, and correct it."


async def generate(args, sample, sampling_params, engine, evaluation=False):
    conversation, messages = engine.conversation(sample), []
    for _ in range(1 if evaluation else args.max_turns):
        reply = await conversation.reply(messages)
        if sample.status != sample.Status.COMPLETED:  # the length limit was reached, or the round has ended
            break
        feedback = await asyncio.to_thread(judge, reply["content"], sample.label)
        if feedback is None:
            break
        messages = [{"role": "user", "content": feedback}]
    return sample


def judge(answer: str, label: str) -> str | None:
    """Return what the environment says to an answer; None if the answer is right."""
    if last_boxed(answer) is None:
        return WITHOUT_ANSWER
    return None if grade_math(answer, label) else WRONG
