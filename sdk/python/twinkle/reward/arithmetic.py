"""Exact evaluation of arithmetic expressions over integers, without executing them as code."""

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction

from twinkle.reward.errors import InvalidRewardInput

_MAX_CHARS = 256
"""Maximum length of an expression. Without powers, a result has at most as many digits as its expression."""
_ALPHABET = re.compile(r'[\d+\-*/() ]*', re.ASCII)
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(expression: str) -> tuple[Fraction, list[int]]:
    """Return the exact value of an expression of `+ - * / ( )` and integers, and its integers in order.

    Raises:
        InvalidRewardInput: the expression is too long, is not arithmetic, or divides by zero.
    """
    if len(expression) > _MAX_CHARS or not _ALPHABET.fullmatch(expression):
        raise InvalidRewardInput('expression', f'must have at most {_MAX_CHARS} characters, all from 0-9 + - * / ( )')
    try:
        tree = ast.parse(expression.strip(), mode='eval')
        numbers: list[int] = []
        return _value(tree.body, numbers), numbers
    except ZeroDivisionError as error:
        raise InvalidRewardInput('expression', 'divides by zero') from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidRewardInput('expression', 'is not arithmetic') from error


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left, numbers), _value(node.right, numbers)
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, numbers)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return Fraction(node.value)
    raise InvalidRewardInput('expression', f'contains a {type(node).__name__}, which is not arithmetic')
