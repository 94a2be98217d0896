"""A calculator agent, written for any OpenAI-compatible server. It knows nothing of training.

OPENAI_BASE_URL=http://127.0.0.1:30000/v1 OPENAI_API_KEY=none python agent.py "12*(3+4)"
"""

import ast
import json
import operator
import sys

from openai import OpenAI

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "The value of an expression of whole numbers, +, -, * and parentheses.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


def solve(client: OpenAI, question: str, max_turns: int = 8) -> str:
    """Ask the model, do what it wants, until it answers."""
    messages = [{"role": "user", "content": question}]
    for _ in range(max_turns):
        reply = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
        if not reply.tool_calls:
            return reply.content or ""
        messages.append(reply)
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": use(call.function)} for call in reply.tool_calls
        ]
    return ""


def use(function) -> str:
    """What the tool says to a call."""
    try:
        return str(value(ast.parse(json.loads(function.arguments)["expression"], mode="eval").body))
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError) as error:
        return f"error: {type(error).__name__}"


def value(node) -> int:
    """Of a parsed expression, without `eval`: the model may write anything."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError("not an expression of whole numbers")


if __name__ == "__main__":
    print(solve(OpenAI(), sys.argv[1]))
