"""Create a model of about 400,000 parameters and six wishes, with which the example runs in minutes on a CPU.

The model has seen random conversations: it knows how to call a tool and how to say no, but not when. The tokenizer has
one token for each call that changes an order, because a model of this size cannot write JSON.
"""

import json
import random
import sys
from pathlib import Path

from penstock.flows.commands.demo_model import make_tiny_model, make_tokenizer

ORDERS = {"a1": "lamp, pending", "b2": "chair, delivered", "c3": "book, shipped", "d4": "clock, delivered"}
CALLS = [(tool, order) for tool in ("cancel", "refund") for order in ORDERS]
CALL = '<tool_call>{"name": "%s", "arguments": {"order": "%s"}}</tool_call>'
WISHES = [
    {"tool": "cancel", "order": "a1"},
    {"tool": "cancel", "order": "a1", "vague": True},
    {"tool": "refund", "order": "b2"},
    {"tool": "refund", "order": "c3"},  # forbidden by the shop's policy: the order is still on its way
    {"tool": "refund", "order": "d4"},
    {"tool": "refund", "order": "d4", "vague": True},
]
TEMPLATE = (  # tool results are rendered as system messages, because the tokenizer has no token for tools
    "{% for m in messages %}{{ '<|' + ('system' if m.role == 'tool' else m.role) + '|>' "
    "+ (m.content or '') + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
STEPS, BATCH = 150, 32


def random_conversation(rng: random.Random) -> list[dict]:
    """Return a conversation in which the agent calls a random tool with a random order, asks, or refuses."""
    tool, order = rng.choice(CALLS)
    vague = rng.random() < 0.3
    messages = [("system", "shop"), ("user", f"please {tool} my order" + ("" if vague else f" {order}"))]
    if vague and rng.random() < 0.8:
        messages += [("assistant", "which"), ("user", f"order {order}")]
    if rng.random() < 0.6:
        called = rng.choice(CALLS)
        status = {"cancel": "cancelled", "refund": "refunded"}[called[0]]
        result = f"{ORDERS[called[1]].partition(',')[0]}, {status}"
        messages += [("assistant", CALL % called), ("tool", result), ("assistant", "done")]
    else:
        messages.append(("assistant", "no"))
    return [{"role": role, "content": content} for role, content in messages]


def imitate(directory: Path, tokenizer) -> None:
    """Train the model in `directory` to continue random conversations."""
    import torch
    from transformers import AutoModelForCausalLM

    rng, model = random.Random(0), AutoModelForCausalLM.from_pretrained(directory)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(STEPS):
        texts = [tokenizer.apply_chat_template(random_conversation(rng), tokenize=False) for _ in range(BATCH)]
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        optimizer.zero_grad()
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(directory)


def main(directory: str) -> None:
    """Write model/ and prompts.jsonl into `directory`."""
    model = make_tiny_model(Path(directory) / "model", vocab=72)
    tokenizer = make_tokenizer(words=[CALL % call for call in CALLS])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    imitate(model, tokenizer)
    rows = [{"prompt": "shop", "metadata": {"wish": wish}} for wish in WISHES]
    (Path(directory) / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(sys.argv[1])
