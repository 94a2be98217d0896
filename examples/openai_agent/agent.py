"""A calculator agent for any OpenAI-compatible server. It does not depend on Penstock.

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
            "description": "Compute the value of an expression of integers, +, -, * and parentheses.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


def solve(client: OpenAI, question: str, max_turns: int = 8) -> str:
    """Return the model's answer to a question, after running the tools that it calls in up to `max_turns` requests."""
    messages = [{"role": "user", "content": question}]
    for _ in range(max_turns):
        reply = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
        if not reply.tool_calls:
            return reply.content or ""
        messages.append(reply)
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": run_tool(call.function)} for call in reply.tool_calls
        ]
    return ""


def run_tool(function) -> str:
    """Return the result of a tool call of the model as text, or `error: ...` if its arguments are invalid."""
    try:
        return str(evaluate(ast.parse(json.loads(function.arguments)["expression"], mode="eval").body))
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError) as error:
        return f"error: {type(error).__name__}"


def evaluate(node) -> int:
    """Compute the value of a parsed expression. `eval` would execute any code that the model writes."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -evaluate(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError("the expression is not arithmetic on integers")


if __name__ == "__main__":
    print(solve(OpenAI(), sys.argv[1]))
