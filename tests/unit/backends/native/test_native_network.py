"""What the native engine says of MPI before it uses it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvkeras.backends.native import network
from hvkeras.errors import MachineError
from hvkeras.launch_environments import Launch

OPEN_MPI = "Open MPI v4.1.8, package: Open MPI root@builder Distribution, ident: 4.1.8, repo rev: v4.1.8, Feb 04, 2025"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the library would be."""
    monkeypatch.setattr(network, "PATH", tmp_path / "libhvkeras_native_mpi.so")
    return network.PATH


@pytest.mark.parametrize(
    ("text", "mpi"),
    [(OPEN_MPI, ("Open MPI", "4.1.8")), ("Open MPI 5.0.3", ("Open MPI", "5.0.3")),
     ("MPICH Version:      4.2.0\nMPICH Release date: Fri Feb  9", ("MPICH", "4.2.0")), ("MPICH 4.3", ("MPICH", "4.3")),
     ("Intel(R) MPI Library 2021.11 for Linux* OS", ("Intel MPI", "2021.11")),
     ("Intel MPI 20211100200", ("Intel MPI", "20211100200")), ("MVAPICH 3.0", ("MVAPICH 3.0", ""))],
)
def test_the_kind_of_mpi_is_read(text: str, mpi: tuple[str, str]) -> None:
    assert network.mpi_of(text) == mpi


@pytest.mark.parametrize(
    ("built", "running", "same"),
    [("Open MPI 4.1.2", OPEN_MPI, True), ("Open MPI 5.0.3", OPEN_MPI, False), ("MPICH 4.2.0", OPEN_MPI, False),
     ("Intel MPI 20210900100", "Intel(R) MPI Library 2021.11 for Linux* OS", True)],
)
def test_the_mpi_of_the_build_must_be_the_one_that_runs(
    built: str, running: str, same: bool, library: Path
) -> None:
    library.write_bytes(b"\x7fELF\0hvkeras is built for " + built.encode() + b"\0\0")
    if same:
        assert network.require_built_for(running).startswith(network.mpi_of(running)[0])
        return
    with pytest.raises(MachineError, match="must run on the MPI that it was built for") as raised:
        network.require_built_for(running)
    assert f"built_for='{built}', running='Open MPI 4.1.8'" in str(raised.value)
    assert "HINT: install hvkeras from its sources" in str(raised.value)
    assert "where the mpicc of Open MPI is the first in the PATH" in str(raised.value)


def test_what_is_missing_between_hosts_is_said_in_words(library: Path) -> None:
    by_mpirun, by_hand = Launch("mpirun (Open MPI)", mpi=True), Launch("TF_CONFIG")
    assert "since no MPI was found when its library was built" in network.objection_to_hosts(by_mpirun)
    library.touch()
    assert network.objection_to_hosts(by_mpirun) == ""
    assert "must be launched by mpirun" in network.objection_to_hosts(by_hand)
    assert "the backends horovod and tfdist work between hosts" in network.objection_to_hosts(by_hand)
