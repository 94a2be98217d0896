"""A random model of 402,176 parameters and ten problems, on which the example runs in a minute without a GPU.

A random model never writes JSON. So the tokenizer has ten tokens that are a whole tool call each, one per problem: one
token in six is a call.
"""

import json
import sys
from pathlib import Path

from penstock.flows.commands.demo_model import make_tiny_model, make_tokenizer

PROBLEMS = ["1+1", "2+3", "4+4", "5-2", "7+8", "9-9", "3*4", "6*6", "8*9", "5+12"]
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "%s"}}</tool_call>'
TEMPLATE = (  # results come as the system's words: there is no token for tools
    "{% for m in messages %}{{ '<|' + ('system' if m.role == 'tool' else m.role) + '|>' "
    "+ (m.content or '') + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def main(directory: str) -> None:
    """Write model/ and prompts.jsonl."""
    tokenizer = make_tokenizer(words=[CALL % problem for problem in PROBLEMS])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(make_tiny_model(Path(directory) / "model"))
    rows = [{"prompt": problem, "label": str(eval(problem)), "metadata": {"question": problem}} for problem in PROBLEMS]
    (Path(directory) / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(sys.argv[1])
