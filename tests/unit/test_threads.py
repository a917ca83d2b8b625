"""Every thread that hvkeras starts is in the table of docs/architecture/threads.md, and is a daemon or has a reason."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture" / "threads.md"
_STARTS = {"Thread", "InheritableThread", "Timer", "ThreadPoolExecutor", "to_thread", "run_in_executor"}
_OF_ASYNCIO = {"to_thread", "run_in_executor"}  # whose threads have names of Python's own
_ASYNCIO_NAME = "asyncio_*"
Threads = dict[str, tuple[set[str], bool]]  # by name: the files that start them, and whether all are daemons


def text_of(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def is_true(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def set_later(tree: ast.Module) -> dict[tuple[str, str, str], ast.expr]:
    """What is set as an attribute of a variable, as a Timer takes no name: by function, variable and attribute."""
    found = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Attribute) and isinstance(
                        target.value, ast.Name):
                    found[function.name, target.value.id, target.attr] = node.value
    return found


def started_in(tree: ast.Module) -> list[tuple[str | None, bool]]:
    """The names of the threads that a file starts, and whether each is a daemon."""
    later, variables = set_later(tree), {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    variables[id(node.value)] = function.name, node.targets[0].id
    found: list[tuple[str | None, bool]] = []
    for node in ast.walk(tree):
        assert not (isinstance(node, ast.ClassDef) and any(
            getattr(base, "attr", getattr(base, "id", "")) in _STARTS for base in node.bases)), node.name
        if not isinstance(node, ast.Call):
            continue
        function = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if function in _OF_ASYNCIO:
            found.append((_ASYNCIO_NAME, False))
        elif function in _STARTS:
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            where = variables.get(id(node), ("", ""))
            pool = node.args[1] if function == "ThreadPoolExecutor" and len(node.args) > 1 else None
            name = given.get("name") or given.get("thread_name_prefix") or pool or later.get((*where, "name"))
            found.append((text_of(name), is_true(given.get("daemon") or later.get((*where, "daemon")))))
    return found


def started() -> Threads:
    """All threads that the sources start."""
    threads: dict[str, tuple[set[str], list[bool]]] = defaultdict(lambda: (set(), []))
    for path in [*(ROOT / "hvkeras").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]:
        if ROOT / "hvkeras" / "backends" in path.parents:  # a checkout may have this link
            continue
        file = str(path.relative_to(ROOT))
        for name, is_daemon in started_in(ast.parse(path.read_text())):
            assert name is not None, f"{file}: a thread must have a name"
            threads[name][0].add(file)
            threads[name][1].append(is_daemon)
    for path in (ROOT / "backends").rglob("*.cc"):
        text = path.read_text()
        assert not re.search(r"pthread_create|std::async", text)
        if "tests" in path.parts or not (count := len(re.findall(r"std::thread\(", text))):
            continue
        names = re.findall(r'pthread_setname_np\(pthread_self\(\), "([^"]+)"\)', text)
        assert len(names) == count, f"{path.name}: each thread must name itself"
        for name in names:
            threads[name][0].add(str(path.relative_to(ROOT)))
            threads[name][1].append(False)
    return {name: (files, all(daemons)) for name, (files, daemons) in threads.items()}


def listed() -> Threads:
    """The threads in the table: a thread that is no daemon has the reason in the last column instead."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.read_text().splitlines()
            if line.startswith("| `")]
    found: Threads = {}
    for name, starts, ends, daemon in rows:
        assert ends, f"{name}: the table must say who ends it"
        assert daemon == "yes" or daemon.startswith("no: "), f"{name}: yes, or no and the reason. Received: {daemon}"
        found[name.strip("`")] = set(re.findall(r"`((?:hvkeras|backends)/[\w/]+\.(?:py|cc))`", starts)), daemon == "yes"
    assert len(found) == len(rows), "each thread has one row"
    return found


def test_the_table_lists_every_thread():
    assert listed() == started()
