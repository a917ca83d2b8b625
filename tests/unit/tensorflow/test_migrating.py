"""docs/migrating.md: its tables are those of the code."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from hvkeras.backends import backend_class
from hvkeras.settings import IGNORED

PAGE = Path(__file__).resolve().parents[3] / "docs" / "migrating.md"
BACKENDS = ("native", "horovod", "tfdist")
MODULES = ("hvkeras.tensorflow", "hvkeras.tensorflow.keras", "hvkeras.keras", "hvkeras.tensorflow.elastic",
           "hvkeras.tensorflow.keras.elastic", "hvkeras.tensorflow.keras.callbacks", "hvkeras.common.process_sets",
           "hvkeras.common.util", "hvkeras.common.exceptions", "hvkeras.common.elastic", "hvkeras.tensorflow.functions",
           "hvkeras.tensorflow.mpi_ops", "hvkeras.tensorflow.sync_batch_norm", "hvkeras.tensorflow.compression",
           "hvkeras.common.basics", "hvkeras.runner")
TWINS = {name: importlib.import_module(name) for name in MODULES}
OF_SESSIONS = ("BroadcastGlobalVariablesHook", "broadcast_global_variables")


def ignored_variables() -> str:
    rows = [f"| `{name}` | {why} |" for name, why in IGNORED.items()]
    return "\n".join(["| variable | why |", "| --- | --- |", *rows])


def names() -> str:
    objections = {name: backend_class(name)().objection_to_sessions for name in BACKENDS}
    columns = " | ".join(["module", "names", *(f"`{name}`" for name in BACKENDS)])
    lines = [f"| {columns} |", "| --- " * 5 + "|"]
    for module, found in TWINS.items():
        twin = f"`horovod{module.removeprefix('hvkeras')}`"
        public = [name for name in found.__all__ if name not in ("callbacks", "elastic")]
        for group in ([name for name in public if name not in OF_SESSIONS],
                      [name for name in public if name in OF_SESSIONS]):
            if group:
                states = [f"no: {objections[name]}" if group[0] in OF_SESSIONS and objections[name] else "yes"
                          for name in BACKENDS]
                lines.append(f"| {twin} | {', '.join(f'`{name}`' for name in group)} | {' | '.join(states)} |")
    return "\n".join(lines)


@pytest.mark.parametrize(("mark", "table"), [("ignored", ignored_variables), ("names", names)])
def test_the_page_has_the_table(mark: str, table: object) -> None:
    assert callable(table)
    expected = f"<!-- {mark} -->\n\n{table()}\n"
    assert expected in PAGE.read_text(), f"docs/migrating.md must hold:\n{expected}"


if __name__ == "__main__":  # writes the tables into the page
    text = PAGE.read_text()
    for mark, table in (("ignored", ignored_variables), ("names", names)):
        before, after = text.split(f"<!-- {mark} -->\n", 1)
        rest = after.lstrip("\n")
        while rest.startswith("|"):
            rest = rest.split("\n", 1)[1]
        text = f"{before}<!-- {mark} -->\n\n{table()}\n\n{rest.lstrip(chr(10))}"
    PAGE.write_text(text)
