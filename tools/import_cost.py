"""Duration of `import hvkeras` and of `hvkeras --help`, each measured in separate processes.

    python tools/import_cost.py [--times 15]

Prints medians in milliseconds. For the import: hvkeras's own modules and the other modules that it imports (such as
NumPy, but not TensorFlow), with the slowest of each. For the command: its total time, and that of `python -c pass`.
Limits: 50 ms for hvkeras's own modules, 150 ms for the command.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

_LINE = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)")


def own_times(program: str) -> dict[str, float]:
    """Return the import time in milliseconds of each module that a program imports, without its submodules' imports."""
    done = subprocess.run([sys.executable, "-I", "-X", "importtime", "-c", program], capture_output=True, text=True,
                          check=True)
    return {name: int(microseconds) / 1000 for microseconds, name in _LINE.findall(done.stderr)}


def seconds(command: list[str]) -> float:
    """Return the duration of a command in seconds."""
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def import_cost(times: int) -> None:
    """Print the duration of the import."""
    runs = [own_times("import hvkeras") for _ in range(times)]
    idle = set(own_times("pass"))
    modules = {name: median(run[name] for run in runs) for name in runs[0] if name not in idle}
    for label, ours in (("hvkeras's own modules", True), ("other modules", False)):
        part = {name: cost for name, cost in modules.items() if (name.split(".")[0] == "hvkeras") is ours}
        slowest = sorted(part, key=lambda name: -part[name])[:5]
        print(f"import hvkeras: {sum(part.values()):6.1f} ms in {len(part)} modules: {label}; "
              + ", ".join(f"{name} {part[name]:.1f}" for name in slowest))
    if "tensorflow" in modules:
        print("import hvkeras imports TensorFlow")


def command_cost(times: int) -> None:
    """Print the duration of the command and of an idle Python, measured alternately."""
    command = shutil.which("hvkeras", path=str(Path(sys.executable).parent))
    if command is None:
        raise SystemExit("hvkeras must be installed beside the running Python. Received:"
                         f" python={sys.executable!r}. HINT: run this tool with the Python of that environment.")
    helps, idles = [], []
    for _ in range(times):
        helps.append(seconds([command, "--help"]))
        idles.append(seconds([sys.executable, "-c", "pass"]))
    print(f"hvkeras --help: {1000 * median(helps):6.1f} ms, including {1000 * median(idles):.1f} for an idle Python")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=15, help="processes of each kind (default: %(default)s)")
    given = parser.parse_args()
    import_cost(given.times)
    command_cost(given.times)
