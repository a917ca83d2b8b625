"""Which UCX the native engine takes, which cards it names, and what it says without UCX."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib import util
from pathlib import Path

import pytest

from harness.processes import run_python
from hvkeras.backends.native import NativeBackend, network
from hvkeras.control.launch_environments import Launch

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


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None or not network.ucx_folder(),
                    reason="needs g++, and UCX: pip install libucx-cu12")
def test_what_ucx_reports_as_failed_is_an_error(tmp_path: Path) -> None:
    native = ROOT / "backends" / "native"
    sources = [native / name for name in ("tests/ucx_link_test.cc", "ucx/link.cc", "ucx/load.cc", "core/notifier.cc",
                                          "core/status.cc", "core/synchronization.cc")]
    made = subprocess.run(["g++", "-std=c++17", "-g", "-fsanitize=address", *map(str, sources), "-o",
                           str(tmp_path / "test"), "-ldl", "-pthread"], capture_output=True, text=True, timeout=200)
    assert made.returncode == 0, made.stderr
    # UCX's own memory is none of ours, and a process that a sanitizer watches has no room for its large stacks.
    done = subprocess.run([str(tmp_path / "test"), network.ucx_folder()], capture_output=True, text=True, timeout=100,
                          env=os.environ | {"ASAN_OPTIONS": "detect_leaks=0", "UCX_HANDLE_ERRORS": "none",
                                            "UCX_MEM_EVENTS": "n"})
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stdout + done.stderr


# A port is lost to somebody else, another thread opens a listener, and then the kernel takes no filter.
OPENING = """
import errno, socket
from types import SimpleNamespace
from hvkeras.backends.native import network, ports
from hvkeras.backends.native.ucx import Ucx
from hvkeras.backends.cpp_library import library
from hvkeras.errors import MachineError

def listening():
    return [one.own for one in ports._tcp_sockets() if one.state == ports._LISTENING]

def reaches(address):
    try:
        with socket.create_connection(address, timeout=0.3, source_address=("127.0.0.3", 0)):
            return True
    except TimeoutError:
        return False

ucx = Ucx(library(), network.ucx_folder())
opened, others, found = ucx.open, [], ports._free_port

def open_beside_another_thread(*arguments):
    others.append(socket.create_server(("127.0.0.1", 0)))
    return opened(*arguments)

ucx.open = open_beside_another_thread
net = SimpleNamespace(ucx=ucx, addresses=["127.0.0.2"], settings={"NET_DEVICES": "lo", "TLS": "tcp"})
taken = socket.create_server(("127.0.0.1", 0))
offered = [taken.getsockname()[1]]
ports._free_port = lambda: offered.pop() if offered else found()
link = network.Link(net, 0, 2)
(own,) = link.ports
address, _, port = own.rpartition(":")
print("ucx reached:", reaches((address, int(port))))
link.close()
print("left:", sorted(set(listening()) - {f"127.0.0.1:{one.getsockname()[1]}" for one in [taken, *others]}))
print("others reached:", [reaches(one.getsockname()) for one in [taken, *others]])

def refused(*arguments):
    raise OSError(errno.EPERM, "Operation not permitted")

ports._attach = refused
before = listening()
try:
    network.Link(net, 1, 2)
except MachineError as error:
    print(error)
print("left:", len(listening()) - len(before) - 1)
"""


@pytest.mark.slow
@pytest.mark.skipif(not network.ucx_folder(), reason="needs UCX: pip install libucx-cu12")
def test_ucx_alone_is_filtered_and_closed_if_that_fails(tmp_path: Path) -> None:
    done = run_python(OPENING, cwd=tmp_path)
    assert done.stdout.splitlines() == [
        "ucx reached: False",
        "left: []",
        "others reached: [True, True, True]",
        ("The kernel must let the native engine choose which hosts reach its ports. Received: "
         f"user={os.getuid()}, error='Operation not permitted'. HINT: start the job as root, raise net.core.optmem_max"
         " if there is no memory, or choose another backend, such as tfdist."),
        "left: 0",
    ], done
