"""Create a random model of 402,176 parameters and ten problems, with which the example runs in a minute on a CPU.

A random model almost never writes valid JSON. Therefore the tokenizer has one token for a complete tool call of each
problem; one sampled token in six is a tool call.
"""

import json
import sys
from pathlib import Path

from penstock.flows.commands.demo_model import make_tiny_model, make_tokenizer

PROBLEMS = ["1+1", "2+3", "4+4", "5-2", "7+8", "9-9", "3*4", "6*6", "8*9", "5+12"]
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "%s"}}</tool_call>'
TEMPLATE = (  # tool results are rendered as system messages, because the tokenizer has no token for tools
    "{% for m in messages %}{{ '<|' + ('system' if m.role == 'tool' else m.role) + '|>' "
    "+ (m.content or '') + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def main(directory: str) -> None:
    """Write model/ and prompts.jsonl into `directory`."""
    tokenizer = make_tokenizer(words=[CALL % problem for problem in PROBLEMS])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(make_tiny_model(Path(directory) / "model"))
    rows = [{"prompt": problem, "label": str(eval(problem)), "metadata": {"question": problem}} for problem in PROBLEMS]
    (Path(directory) / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(sys.argv[1])
