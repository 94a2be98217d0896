"""A calculator that the model may use while it answers: `--custom-generate-function-path
examples/multi_turn_tool/generate.py`.

The model writes `<calculator>12*(3+4)</calculator>`, stops, reads `<result>84</result>` and continues. What it
writes is trained on, what the calculator says is not.
"""

import ast
import operator
import re

CALL = re.compile(r"<calculator>([^<]*)</calculator>$")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


async def generate(args, sample, sampling_params, engine):
    for _ in range(args.max_turns):
        text = await engine.generate(sample, stop=["</calculator>"])
        call = CALL.search(text)
        if call is None or not engine.append(sample, f"<result>{calculated(call[1])}</result>"):
            break
    return sample


def calculated(expression: str) -> str:
    """What the calculator says."""
    try:
        return f"{value(ast.parse(expression.strip(), mode='eval').body):.10g}"
    except (ValueError, SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
        return f"error: {type(error).__name__.lower()}"


def value(node):
    """Of a parsed expression, without `eval`: the model may write anything."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    raise ValueError("no arithmetic")
