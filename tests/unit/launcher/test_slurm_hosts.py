"""The hosts of an allocation, from Slurm's variables; tests/clusters has the real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvkeras.errors import MachineError
from hvkeras.launcher.placement import allocated_hosts

# What `scontrol show hostnames` of Slurm 22.05 prints for these lists.
EXPANDED = {"n[1-3]": "n1\\nn2\\nn3\\n", "n7": "n7\\n"}


@pytest.fixture(autouse=True)
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's own expansion, for machines without Slurm."""
    cases = "".join(f"'{nodes}') printf '{names}' ;;\n" for nodes, names in EXPANDED.items())
    refusal = "*) echo Invalid hostlist >&2; exit 1 ;;\n"
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\ncase "$3" in\n{cases}{refusal}esac\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


@pytest.mark.parametrize(("nodes", "this", "tasks", "count", "hosts"), [
    ("n[1-3]", "n1", "2(x2),1", None, "localhost:2,n2:2,n3:1"),
    ("n[1-3]", "", "4(x3)", 5, "n1:4,n2:4,n3:4"),
    ("n[1-3]", "n2", "", None, "n1:1,localhost:1,n3:1"),
    ("n[1-3]", "n1", "1(x3)", 8, "localhost:3,n2:3,n3:3"),
    ("n7", "n7", "4", None, "localhost:4"),
    ("n7", "n7", "1", 2, None),
    ("n7", "", "1", 2, "n7:2"),
    ("", "", "", 2, None),
])
def test_the_hosts_are_those_of_the_allocation(nodes: str, this: str, tasks: str, count: int | None,
                                               hosts: str | None) -> None:
    environ = {"SLURM_JOB_NODELIST": nodes, "SLURMD_NODENAME": this, "SLURM_TASKS_PER_NODE": tasks}
    assert allocated_hosts(environ, count) == hosts


def test_a_list_that_slurm_cannot_read_is_named() -> None:
    with pytest.raises(MachineError, match=r"Invalid hostlist.*SLURM_JOB_NODELIST='x\[1'.*-H"):
        allocated_hosts({"SLURM_JOB_NODELIST": "x[1"}, 2)
