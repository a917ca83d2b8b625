"""Options and fixtures of the contract tests: the backend, the numbers of ranks, the launcher."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hvkeras.backends import backend_class, backend_names
from hvkeras.backends.contract.job import ContractJob, launcher_for, run
from hvkeras.errors import HvkerasError, explain


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("contract", "contract of a backend of hvkeras")
    group.addoption("--backend", metavar="NAME", help="the backend: one of " + ", ".join(backend_names()))
    group.addoption("--ranks", metavar="N,N", default="2,4", help="numbers of ranks to run on (default: 2,4)")
    group.addoption("--launcher", choices=("auto", "hvkeras", "mpirun"), default="auto", help="what starts the ranks"
                    " (default: hvkeras run, or mpirun if the backend does not support that)")
    group.addoption("--hosts", metavar="HOST:N,HOST:N", default="", help="hosts to run the ranks on, and their slots;"
                    " they must share this folder and the temporary folder (default: this host)")
    group.addoption("--clause-deadline", type=float, default=60.0, metavar="SECONDS", help="timeout of each clause"
                    " (default: 60)")


def pytest_configure(config: pytest.Config) -> None:
    """Reject a missing or unknown backend, and numbers of ranks below two."""
    name = config.getoption("--backend")
    if name is None:
        raise pytest.UsageError(explain("--backend must name the backend to test", f"--backend {backend_names()[0]}"))
    try:
        backend_class(name)
    except HvkerasError as error:
        raise pytest.UsageError(str(error)) from None
    counts = config.getoption("--ranks")
    if not all(count.isdecimal() and int(count) > 1 for count in counts.split(",")):
        raise pytest.UsageError(explain("--ranks must be numbers of two or more", "--ranks 2,4", ranks=counts))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests with a `ranks` argument by the option `--ranks`."""
    if "ranks" in metafunc.fixturenames:
        counts = [int(count) for count in metafunc.config.getoption("--ranks").split(",")]
        metafunc.parametrize("ranks", counts, ids=[f"{count} ranks" for count in counts], scope="session")


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> str:
    """Return the backend's name."""
    return str(request.config.getoption("--backend"))


@pytest.fixture(scope="session")
def job(request: pytest.FixtureRequest, backend: str, tmp_path_factory: pytest.TempPathFactory
        ) -> Callable[[str, int], ContractJob]:
    """Return a function that runs a part of the contract on a number of ranks, once per session."""
    jobs: dict[tuple[str, int], ContractJob] = {}
    chosen, hosts = request.config.getoption("--launcher"), request.config.getoption("--hosts")

    def once(part: str, ranks: int) -> ContractJob:
        if (part, ranks) not in jobs:
            launcher = launcher_for(backend, ranks, hosts) if chosen == "auto" else chosen
            jobs[part, ranks] = run(backend, part, ranks, launcher, request.config.getoption("--clause-deadline"),
                                    tmp_path_factory.mktemp(part), hosts)
        return jobs[part, ranks]

    return once
