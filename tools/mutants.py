"""Mutation testing: random single-line changes, to see which of them the tests detect.

`python tools/mutants.py --seed 1 --count 20` prints changes: random lines of the Python and C++ code in hvkeras/ and
backends/, each with one of its possible mutations. `--apply 3 --in FOLDER` applies the third one to a tree that has
these two folders, and `--undo 3` reverts it.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"), ast.BitOr: ("|", "&"), ast.BitAnd: ("&", "|"),
}
# C++ is mutated as text: pattern and replacement. In templates and includes, `<` has no spaces around it.
_CPP = (
    (r" == ", " != "), (r" != ", " == "), (r" < ", " <= "), (r" <= ", " < "), (r" > ", " >= "), (r" >= ", " > "),
    (r" && ", " || "), (r" \|\| ", " && "), (r" \+ ", " - "), (r" - ", " + "), (r" \* (?=\w)", " / "),
    (r"\btrue\b", "false"), (r"\bfalse\b", "true"), (r"(?<![\w.'])(\d+)(?![\w.'])", None),
    (r"\bif \((?=[\w.>():-]+\)(?: |$))", "if (!"),
    (r"^(\s*)[\w:.\->\[\]]+\([^;{}]*\);$", r"\1;"), (r"^(\s*)return [^;{}]+;$", r"\1return {};"),
)


@dataclass(frozen=True, order=True)
class Change:
    """Mutation of one line.

    Attributes:
        path: The file, relative to the root of the tree.
        line: The line number, from 1.
        old: The text of the line.
        new: The mutated text.
    """

    path: str
    line: int
    old: str
    new: str


class Changes(ast.NodeVisitor):
    """All mutations of a Python file: of comparisons, conditions, numbers, arithmetic, values and calls.

    Args:
        path: The file, relative to the root of the tree.
        text: Its text.
    """

    def __init__(self, path: str, text: str) -> None:
        self.found: list[Change] = []
        self._path, self._lines = path, text.splitlines()
        tree = ast.parse(text)
        self._skipped = set(_types_and_docstrings(tree))
        self.visit(tree)

    def visit(self, node: ast.AST) -> None:
        """Visit a node, unless it has no effect at run time."""
        if node not in self._skipped:
            super().visit(node)
            self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        self._between(node.left, node.comparators[0], *_COMPARISONS[type(node.ops[0])])

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        operators = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(left, right, *operators)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in _ARITHMETIC:
            self._between(node.left, node.right, *_ARITHMETIC[type(node.op)])

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._become(node, str(not node.value))
        elif isinstance(node.value, (int, float)):
            self._become(node, repr(node.value + 1))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._change(node.lineno, node.col_offset, node.operand.col_offset, "")

    def visit_If(self, node: ast.If | ast.IfExp | ast.While) -> None:
        test = node.test
        if not isinstance(test, (ast.Compare, ast.UnaryOp)):
            old = self._lines[test.lineno - 1][test.col_offset:test.end_col_offset]
            self._become(test, f"not ({old})")

    visit_IfExp = visit_While = visit_If

    def visit_Expr(self, node: ast.Expr | ast.Raise) -> None:
        if not isinstance(getattr(node, "value", None), ast.Yield):
            self._become(node, "pass")

    visit_Raise = visit_Expr

    def visit_Return(self, node: ast.Return | ast.Assign) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self._become(node.value, "None")

    visit_Assign = visit_Return

    def _become(self, node: ast.expr | ast.stmt, new: str) -> None:
        if node.lineno == node.end_lineno and node.end_col_offset is not None:
            self._change(node.lineno, node.col_offset, node.end_col_offset, new)

    def _between(self, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        start = left.end_col_offset or 0 if left.end_lineno == right.lineno else 0
        index = self._lines[right.lineno - 1].find(old, start, right.col_offset)
        if index >= 0:
            self._change(right.lineno, index, index + len(old), new)

    def _change(self, line: int, start: int, end: int, new: str) -> None:
        old = self._lines[line - 1]
        if old.isascii():
            self.found.append(Change(self._path, line, old, old[:start] + new + old[end:]))


def _types_and_docstrings(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield nodes without effect at run time: annotations, docstrings, and code for type checkers."""
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            if isinstance(found := getattr(node, field, None), ast.AST):
                yield from ast.walk(found)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from ast.walk(node)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node


def changes_of_cpp(path: str, text: str) -> Iterator[Change]:
    """Yield all mutations of a C++ file."""
    for number, line in enumerate(text.splitlines(), 1):
        code = re.sub(r'"(?:[^"\\]|\\.)*"', lambda found: '"' + "_" * (len(found[0]) - 2) + '"', line).split("//")[0]
        if not code.strip() or code.lstrip().startswith(("#", "*", "/*", "using", "static_assert", "template")):
            continue
        for pattern, new in _CPP:
            for found in re.finditer(pattern, code):
                mutated = str(int(found[1]) + 1) if new is None else found.expand(new)
                yield Change(path, number, line, line[:found.start()] + mutated + line[found.end():])


def draw(root: Path, seed: int, count: int) -> list[Change]:
    """Return one mutation each of `count` random lines.

    Args:
        root: A tree with hvkeras/ and backends/.
        seed: The seed.
        count: The number of lines.
    """
    by_line: dict[tuple[str, int], list[Change]] = {}
    for folder in ("hvkeras", "backends"):
        for file in sorted((root / folder).rglob("*")):
            path = str(file.relative_to(root))
            found: Iterable[Change] = ()
            if path.startswith("hvkeras/backends"):
                continue
            if file.suffix == ".py":
                found = Changes(path, file.read_text()).found
            elif file.suffix in (".cc", ".h"):
                found = changes_of_cpp(path, file.read_text())
            for change in found:
                if change.old != change.new:
                    by_line.setdefault((change.path, change.line), []).append(change)
    chooser = random.Random(seed)
    lines = chooser.sample(sorted(by_line), count)
    return [chooser.choice(sorted(set(by_line[line]))) for line in lines]


def main() -> int:
    """Print the mutations, or apply or revert one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--apply", type=int, metavar="N", help="apply the change N, counted from 1")
    parser.add_argument("--undo", type=int, metavar="N", help="revert the change N")
    parser.add_argument("--in", dest="tree", type=Path, default=ROOT, help="the tree (default: this checkout)")
    options = parser.parse_args()
    found = draw(ROOT, options.seed, options.count)
    number = options.apply or options.undo
    if number is None:
        for index, change in enumerate(found, 1):
            print(f"{index:2} {change.path}:{change.line}\n   - {change.old.strip()}\n   + {change.new.strip()}")
        return 0
    change = found[number - 1]
    file = options.tree / change.path
    lines = file.read_text().splitlines(keepends=True)
    old, new = (change.old, change.new) if options.apply else (change.new, change.old)
    if lines[change.line - 1].rstrip("\n") != old:
        print(f"{file}:{change.line} must read {old!r}. Received: {lines[change.line - 1]!r}.")
        return 1
    lines[change.line - 1] = new + "\n"
    file.write_text("".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
