"""Create a random model of about 400,000 parameters and six wishes, with which the example runs in minutes on a CPU.

A random model almost never writes valid JSON. Therefore the tokenizer has one token for each call that changes an
order. One wish is against the policy, so a model that calls nothing gets a mean reward of 1/6.
"""

import json
import sys
from pathlib import Path

from penstock.flows.commands.demo_model import make_tiny_model, make_tokenizer

CALL = '<tool_call>{"name": "%s", "arguments": {"order": "%s"}}</tool_call>'
ORDERS = ["a1", "b2", "c3", "d4"]
WISHES = [
    {"tool": "cancel", "order": "a1"},
    {"tool": "cancel", "order": "a1", "vague": True},
    {"tool": "refund", "order": "b2"},
    {"tool": "refund", "order": "c3"},  # against the policy: it is on its way
    {"tool": "refund", "order": "d4"},
    {"tool": "refund", "order": "d4", "vague": True},
]
TEMPLATE = (  # tool results are rendered as system messages, because the tokenizer has no token for tools
    "{% for m in messages %}{{ '<|' + ('system' if m.role == 'tool' else m.role) + '|>' "
    "+ (m.content or '') + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def main(directory: str) -> None:
    """Write model/ and prompts.jsonl into `directory`."""
    words = [CALL % (tool, order) for tool in ("cancel", "refund") for order in ORDERS]
    tokenizer = make_tokenizer(words=words)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(make_tiny_model(Path(directory) / "model", vocab=72))
    rows = [{"prompt": "shop", "metadata": {"wish": wish}} for wish in WISHES]
    (Path(directory) / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(sys.argv[1])
