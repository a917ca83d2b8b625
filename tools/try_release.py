"""Install files of a release as a user does, use each of them, and uninstall it.

    python tools/try_release.py dist/*_x86_64.whl                       # with tensorflow-cpu
    python tools/try_release.py --extra tensorflow dist/*.tar.gz        # the source distribution, compiled here

A new virtual environment of the running Python, in a folder with a space in its name, gets each file in turn. There,
`hvkeras doctor` must find no problem, and the README's script must train on two processes with the native engine.
After `pip uninstall hvkeras`, nothing of hvkeras may be left in the environment, the working folder, the home folder,
the folder for temporary files, or /dev/shm.

The script only needs Python's standard library, and a package index for pip.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED_MEMORY = Path("/dev/shm")
DEADLINE_SECONDS = 1800.0  # of each command; the longest installs TensorFlow
GRACE_SECONDS = 10.0  # in which jobs of other programs may end, or show that a segment is theirs
# Prints the files and folders among the installed packages that belong to none of them.
UNOWNED = """import importlib.metadata, pathlib, sysconfig
owned = {file.parts[0] for one in importlib.metadata.distributions() for file in one.files or ()}
for path in pathlib.Path(sysconfig.get_path("purelib")).iterdir():
    if path.name not in owned | {"__pycache__"}:
        print(path)
"""


class Environment:
    """A new virtual environment, with a home, a folder for temporary files and a working folder of its own.

    Args:
        folder: An empty folder for all of them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "environment"
        self.home, self.temporary, self.work = (folder / name for name in ("home", "temporary", "work"))
        for one in (self.home, self.temporary, self.work):
            one.mkdir()
        venv.create(self.folder, symlinks=True, with_pip=True)
        self._bin = self.folder / "bin"

    def pip(self, *arguments: str | Path) -> None:
        """Run pip with its usual configuration and cache."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self._run(("python", "-I", "-m", "pip", "--disable-pip-version-check", *arguments), inherited)

    def run(self, *command: str | Path) -> str:
        """Run a command in the working folder, with no variables except those of a new user, and return its output."""
        return self._run(command, {"HOME": str(self.home), "TMPDIR": str(self.temporary), "LANG": "C.UTF-8"})

    def left(self) -> list[str]:
        """Return what an uninstalled hvkeras has left behind."""
        unowned = self.run("python", "-I", "-c", UNOWNED).splitlines()
        named = [str(path) for path in self.folder.rglob("*hvkeras*")]
        # Keras writes its configuration.
        written = [str(path) for folder in (self.home, self.temporary, self.work) for path in folder.iterdir()
                   if path != self.home / ".keras"]
        return sorted({*unowned, *named, *written})

    def _run(self, command: tuple[str | Path, ...], variables: dict[str, str]) -> str:
        path = f"{self._bin}{os.pathsep}{variables.get('PATH', os.defpath)}"
        done = subprocess.run([self._bin / command[0], *command[1:]], cwd=self.work, text=True, check=False,
                              env=variables | {"PATH": path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              timeout=DEADLINE_SECONDS)
        if done.returncode != 0:
            raise SystemExit(f"{done.stdout}\nexit code {done.returncode}: {' '.join(map(str, command))}")
        return done.stdout


def segments() -> set[str]:
    """Return the names of hvkeras's shared memory, except that which a running process has mapped."""
    named = {path.name for path in SHARED_MEMORY.glob("hvkeras-*")}
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps") if named else ():
        try:
            mapped |= set(re.findall(rf"{SHARED_MEMORY}/(hvkeras-[0-9a-f]+)", maps.read_text()))
        except OSError:  # the process has ended, or belongs to another user
            continue
    return {name for name in named if name.partition(".")[0] not in mapped}


def after_grace(now: Callable[[], set[str]], before: set[str]) -> set[str]:
    """Return the new names that remain after a grace period."""
    deadline = time.monotonic() + GRACE_SECONDS
    while (left := now() - before) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def train(environment: Environment) -> str:
    """Train with the README's script on two processes, and return the last line of its output.

    Raises:
        SystemExit: The job failed, another engine averaged the gradients, or the model has not learned.
    """
    page = (ROOT / "README.md").read_text()
    script = environment.work / "train.py"
    script.write_text(page.partition("<!-- file: train.py -->\n```python\n")[2].partition("```")[0])
    output = environment.run("hvkeras", "run", "-np", "2", "python", script.name)
    script.unlink()
    found = re.search(r"(?m)^\[0\] (test accuracy on 2 processes: (\d\.\d+))$", output)
    if found is None or float(found[2]) < 0.9 or "backend native" not in output:
        raise SystemExit(f"{output}\nThe README's script must train with the native engine.")
    return found[1]


def check(environment: Environment, file: Path, extra: str) -> None:
    """Install a file, use it, uninstall it, and look for what it has left.

    Raises:
        SystemExit: A step failed, or something was left.
    """
    before, began = segments(), time.monotonic()
    environment.pip("install", "--quiet", f"{file}[{extra}]")
    environment.pip("check")
    environment.run("hvkeras", "doctor")
    accuracy = train(environment)
    environment.pip("uninstall", "--quiet", "--yes", "hvkeras")
    left = [*environment.left(), *(f"{SHARED_MEMORY}/{name}" for name in sorted(after_grace(segments, before)))]
    if left:
        raise SystemExit("An uninstalled hvkeras must leave nothing behind. Received:\n" + "\n".join(left))
    sys.stdout.write(f"Python {sys.version.split()[0]}, {file.name}[{extra}]: {accuracy}; uninstalled, nothing left"
                     f" ({time.monotonic() - began:.0f} s)\n")
    sys.stdout.flush()


def main() -> None:
    """Parse the command line, and check each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="wheels or source distributions")
    parser.add_argument("--extra", default="cpu", help="the extra that installs TensorFlow (default: %(default)s)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hvkeras release ") as folder:
        environment = Environment(Path(folder))
        for file in given.files:
            check(environment, file.resolve(), given.extra)


if __name__ == "__main__":
    main()
