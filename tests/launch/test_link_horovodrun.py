"""`hvkeras link-horovodrun` in new virtual environments, with and without Horovod."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.launchers import clean_environment

RANK = "import os; print('rank', os.environ['HVKERAS_RUN_RANK'])"


class Environment:
    """A virtual environment with access to the packages of this one, except Horovod."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        self.folder = folder
        self.packages = next((folder / "lib").glob("python*/site-packages"))
        for name in ("hvkeras", "lazy_loader", "packaging", "psutil", "rich", "wrapt"):
            spec = importlib.util.find_spec(name)
            assert spec is not None
            assert spec.origin is not None
            (self.packages / name).symlink_to(Path(spec.origin).parent)
        self.command = folder / "bin" / "horovodrun"

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = clean_environment(self.folder)
        environment.pop("PYTHONPATH")
        environment["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{environment['PATH']}"
        return subprocess.run(arguments, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=120)

    def link(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(str(self.folder / "bin" / "python"), "-m", "hvkeras", "link-horovodrun", *arguments)

    def install_a_horovod(self) -> None:
        """Install a substitute of Horovod's package, which takes minutes to build: only the launcher's entry point."""
        runner = self.packages / "horovod" / "runner"
        runner.mkdir(parents=True)
        (runner.parent / "__init__.py").touch()
        (runner / "__init__.py").touch()
        (runner / "launch.py").write_text("import sys\ndef run_commandline():\n    print('Horovod', sys.argv[1:])\n")


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "venv")


def test_the_command_does_what_hvkeras_run_does(environment: Environment) -> None:
    done = environment.link()
    assert done.returncode == 0, done.stderr
    assert str(environment.command) in done.stdout
    started = environment.run(str(environment.command), "-np", "2", "python", "-c", RANK)
    assert sorted(started.stdout.splitlines()) == ["[0] rank 0", "[1] rank 1"]
    refused = environment.run(str(environment.command), "-np", "2", "--mpi", "true")
    assert refused.returncode == 2
    assert refused.stderr.startswith("horovodrun: ")


def test_the_command_defers_to_horovod_as_soon_as_that_is_installed(environment: Environment) -> None:
    environment.link()
    environment.install_a_horovod()
    done = environment.run(str(environment.command), "-np", "2", "true")
    assert done.stdout == "Horovod ['-np', '2', 'true']\n"


def test_nothing_is_put_in_place_beside_horovod(environment: Environment) -> None:
    environment.install_a_horovod()
    done = environment.link()
    assert done.returncode == 2
    assert "Horovod's own horovodrun is installed here" in done.stderr
    assert not environment.command.exists()


def test_a_file_that_is_not_ours_is_neither_overwritten_nor_removed(environment: Environment) -> None:
    environment.command.write_text("#!/bin/sh\necho mine\n")
    for arguments in ((), ("--remove",)):
        done = environment.link(*arguments)
        assert done.returncode == 2
        assert f"path='{environment.command}'" in done.stderr
        assert environment.command.read_text() == "#!/bin/sh\necho mine\n"


def test_a_link_that_is_not_ours_stays(environment: Environment) -> None:
    environment.command.symlink_to("/somewhere/horovodrun")
    assert environment.link().returncode == 2
    assert environment.link("--remove").returncode == 2
    assert environment.command.is_symlink()


def test_it_can_be_put_twice_and_removed_twice(environment: Environment) -> None:
    assert [environment.link().returncode for _ in range(2)] == [0, 0]
    assert os.access(environment.command, os.X_OK)
    assert environment.link("--remove").returncode == 0
    assert not environment.command.exists()
    again = environment.link("--remove")
    assert again.returncode == 0
    assert "does not exist" in again.stdout


def test_horovods_own_command_here_stays_what_it_is() -> None:
    """In the environment of these tests, which has the real Horovod."""
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed here")
    own = Path(sys.executable).parent / "horovodrun"
    before = own.read_bytes()
    for arguments in ([], ["--remove"]):
        done = subprocess.run([str(own.with_name("hvkeras")), "link-horovodrun", *arguments], capture_output=True,
                              text=True, timeout=60)
        assert done.returncode == 2
    assert own.read_bytes() == before
