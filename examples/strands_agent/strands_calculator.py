"""A calculator agent of the `strands-agents` package for any OpenAI-compatible server. It does not depend on Penstock.

OPENAI_BASE_URL=http://127.0.0.1:30000/v1 OPENAI_API_KEY=none python strands_calculator.py "12*(3+4)"
"""

import ast
import operator
import os
import sys

from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager
from strands.models.openai import OpenAIModel

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


@tool
def calculate(expression: str) -> str:
    """Compute the value of an expression of integers, +, -, * and parentheses.

    Args:
        expression: the expression, such as 12*(3+4).
    """
    return str(evaluate(ast.parse(expression, mode="eval").body))


def evaluate(node) -> int:
    """Compute the value of a parsed expression. `eval` would execute any code that the model writes."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    raise ValueError("the expression is not arithmetic on integers")


def solve(base_url: str, api_key: str, question: str) -> str:
    """Return the model's answer to a question. Strands runs the tools, and sends their errors to the model."""
    model = OpenAIModel(client_args={"base_url": base_url, "api_key": api_key}, model_id="policy")
    # Without a conversation manager the history is never shortened: a shortened one would become another sample.
    agent = Agent(model, tools=[calculate], callback_handler=None, conversation_manager=NullConversationManager())
    return str(agent(question))


if __name__ == "__main__":
    print(solve(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], sys.argv[1]))
