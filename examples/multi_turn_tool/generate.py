"""Generate responses in which the model may call a calculator: `--custom-generate-function-path
examples/multi_turn_tool/generate.py`.

The model writes `<calculator>12*(3+4)</calculator>` and stops, `<result>84</result>` is appended, and the model
continues. The tokens of the model are trained on, those of the calculator are not.
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
        if call is None or not engine.append(sample, f"<result>{calculate(call[1])}</result>"):
            break
    return sample


def calculate(expression: str) -> str:
    """Return the value of an arithmetic expression as text, or `error: ...` if it is invalid."""
    try:
        return f"{evaluate(ast.parse(expression.strip(), mode='eval').body):.10g}"
    except (ValueError, SyntaxError, ArithmeticError, RecursionError, MemoryError) as error:
        return f"error: {type(error).__name__.lower()}"


def evaluate(node):
    """Compute the value of a parsed expression. `eval` would execute any code that the model writes."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -evaluate(node.operand)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    raise ValueError("the expression is not arithmetic on numbers")
