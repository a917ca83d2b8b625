"""Which UCX the native engine takes, which cards it names, and what it says without UCX."""

from __future__ import annotations

import shutil
import subprocess
from importlib import util
from pathlib import Path

import pytest

from hvkeras.backends.native import NativeBackend, network
from hvkeras.launch_environments import Launch

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture
def nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without UCX."""
    monkeypatch.setattr(network, "_SYSTEM", (str(tmp_path / "system"),))
    monkeypatch.setattr(network, "_INFINIBAND", tmp_path / "infiniband")
    monkeypatch.setattr(network, "find_spec", lambda name: None)
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    return tmp_path


def library(folder: Path) -> str:
    folder.mkdir(parents=True)
    (folder / "libucp.so.0").touch()
    return str(folder)


def test_without_ucx_the_message_says_what_to_install(nothing: Path) -> None:
    for launch in (Launch("mpirun (Open MPI)", mpi=True), Launch("TF_CONFIG")):
        assert NativeBackend.objection(launch, several_hosts=False) == ""
        assert NativeBackend.objection(launch, several_hosts=True) == (
            "between hosts it needs UCX, which is not installed; pip install 'hvkeras[hosts]', or the backends horovod"
            " and tfdist work between hosts as well")
    assert "within one host; between hosts: pip install 'hvkeras[hosts]'" in NativeBackend.availability().reason


def test_the_wheel_comes_first_except_beside_cards_with_rdma(nothing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = library(nothing / "system")
    assert network.ucx_folder() == system
    assert NativeBackend.objection(Launch("TF_CONFIG"), several_hosts=True) == ""
    wheel = library(nothing / "libucx" / "lib")
    spec = util.spec_from_file_location("libucx", nothing / "libucx" / "__init__.py",
                                        submodule_search_locations=[str(nothing / "libucx")])
    monkeypatch.setattr(network, "find_spec", {"libucx": spec}.get)
    assert network.ucx_folder() == wheel
    (nothing / "infiniband" / "mlx5_0").mkdir(parents=True)
    assert network.ucx_folder() == system
    mine = library(nothing / "mine")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{mine}")
    assert network.ucx_folder() == mine


def test_a_card_with_rdma_has_another_name_for_ucx(tmp_path: Path) -> None:
    for card, port in (("eth0", ""), ("eth1", "0\n"), ("ib1", "1\n")):
        (tmp_path / card / "device").mkdir(parents=True)
        if port:
            (tmp_path / card / "dev_port").write_text(port)
    for card in ("eth1", "ib1"):
        (tmp_path / card / "device" / "infiniband" / "mlx5_3").mkdir(parents=True)
    found = {card: network.rdma_devices(card, tmp_path) for card in ("eth0", "eth1", "ib1", "gone")}
    assert found == {"eth0": [], "eth1": ["mlx5_3:1"], "ib1": ["mlx5_3:2"], "gone": []}


@pytest.mark.skipif(shutil.which("g++") is None or util.find_spec("libucx") is None,
                    reason="needs g++, and UCX's headers: pip install libucx-cu12")
def test_the_interface_of_ucx_is_as_it_is_declared() -> None:
    spec = util.find_spec("libucx")
    assert spec is not None and spec.submodule_search_locations
    done = subprocess.run(["g++", "-std=c++17", "-w", "-fsyntax-only", "-I",
                           f"{spec.submodule_search_locations[0]}/include",
                           str(ROOT / "backends" / "native" / "tests" / "ucx_api_test.cc")],
                          capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
