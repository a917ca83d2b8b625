"""Products that sum over dimensions."""

from __future__ import annotations

from hvkeras.partition.decisions import Call
from hvkeras.partition.patterns import Pattern
from hvkeras.partition.rule_table import fitted, rule


@rule("MatMul")
def matrix_product(call: Call) -> Pattern | None:
    """Rows, columns, or what is summed over may be divided."""
    first = "km" if call.attribute("transpose_a") else "mk"
    second = "nk" if call.attribute("transpose_b") else "kn"
    return fitted(call, f"{first},{second}->mn", "sum", "each")


@rule("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def matrix_products(call: Call) -> Pattern | None:
    """Dimensions before the matrices are broadcast."""
    first = "*km" if call.attribute("adj_x") else "*mk"
    second = "*nk" if call.attribute("adj_y") else "*kn"
    return fitted(call, f"{first},{second}->*mn", "sum", "each")


@rule("Einsum")
def einstein_sum(call: Call) -> Pattern | None:
    """The equation is the pattern; along a letter that occurs twice in an operand, a diagonal, it is not divided."""
    equation = call.attribute("equation").replace(" ", "").replace("...", "*")
    operands, _, result = equation.partition("->")
    letters = "".join(dict.fromkeys(character for character in operands if character.isalpha()))
    names = {letter: chr(ord("a") + number) for number, letter in enumerate(letters)}
    if len(names) > 26:
        return None
    written = "".join(names.get(character, character) for character in f"{operands}->{result}")
    return fitted(call, written, "sum", "each")
