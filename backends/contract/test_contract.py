"""Tests of the contract of a backend: see `hvkeras.backends.contract`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from hvkeras.backends import backend_class
from hvkeras.backends.contract.capabilities import CLAUSES as OF_CAPABILITIES
from hvkeras.backends.contract.clauses import CLAUSES
from hvkeras.backends.contract.job import ContractJob, Verdict
from hvkeras.backends.contract.usage import CLAUSES as OF_USAGE
from hvkeras.backends.contract.usage import EAGER, GRAPH
from hvkeras.backends.interface import Backend
from hvkeras.control.launch_environments import Launch, Rendezvous

LAUNCHES = [Launch("hvkeras run", 0, 2, Rendezvous("run")), Launch("TF_CONFIG", 0, 2, Rendezvous("tf_config")),
            Launch("mpirun (Open MPI)", 0, 2, Rendezvous("mpi"), mpi=True)]
# Calls all class methods of a backend, and prints which side effects they had on the process.
CALL_CLASS_METHODS = """
import json, os, sys, threading
from hvkeras.backends import backend_class
from hvkeras.control.launch_environments import Launch, Rendezvous
chosen = backend_class(sys.argv[1])
before = dict(os.environ), threading.active_count()
chosen.availability(), chosen.built_with()
for launch in (Launch("hvkeras run", 0, 2, Rendezvous("run")), Launch("mpirun", 0, 2, Rendezvous("mpi"), mpi=True)):
    for several in (False, True):
        chosen.objection(launch, several)
after = dict(os.environ), threading.active_count()
print(json.dumps([sorted(set(after[0].items()) ^ set(before[0].items())), after[1] - before[1]]))
"""


def test_the_name_is_that_of_the_class(backend: str) -> None:
    chosen = backend_class(backend)
    assert issubclass(chosen, Backend)
    assert chosen.name == backend, f"the entry point and the class must have one name. Received: name={chosen.name!r}."


def test_class_methods_return_the_right_types(backend: str) -> None:
    chosen = backend_class(backend)
    available = chosen.availability()
    assert available.ok, f"the backend must be available here to be tested: {available.reason}"
    assert available.reason, "availability() must return a reason, even if the backend is available"
    built_with = chosen.built_with()
    assert isinstance(built_with, frozenset), f"built_with() must return a frozenset. Received: {built_with!r}."
    assert built_with <= {"MPI", "Gloo", "NCCL"}
    for launch in LAUNCHES:
        assert isinstance(chosen.objection(launch, False), str)
        assert isinstance(chosen.objection(launch, True), str)
        for has_gpu in (False, True):
            assert chosen.preference(launch, has_gpu) is None or isinstance(chosen.preference(launch, has_gpu), int)


def test_class_methods_have_no_side_effects(backend: str) -> None:
    done = subprocess.run([sys.executable, "-c", CALL_CLASS_METHODS, backend], capture_output=True, text=True,
                          timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    variables, threads = json.loads(done.stdout.splitlines()[-1])
    assert not variables, f"class methods must not change environment variables. Received: {variables}."
    assert not threads, f"class methods must not start threads. Received: threads={threads}."


def judge(job: ContractJob, clause: str) -> None:
    """Fail with the result of each rank, or with the last clauses of a job that ended early; skip if not tried."""
    found = [rank.get(clause) for rank in job.found]
    failed = [f"rank {rank}: {result.text}" for rank, result in enumerate(found)
              if result is not None and result.verdict in (Verdict.FAILS, Verdict.HANGS)]
    if failed:
        pytest.fail("\n".join([clause, *failed, f"(full output of the job: {job.log})"]), pytrace=False)
    if None in found:
        last = [[*rank][-1] if rank else "the start of the engine" for rank in job.found]
        hung = any(result.verdict is Verdict.HANGS for rank in job.found for result in rank.values())
        output = [] if hung else [f"$ {job.command}", job.output[-3000:]]
        reason = f"not tried: the job ended with exit code {job.code}; the last clauses of its ranks were"
        pytest.fail("\n".join([clause, reason, *(f"rank {rank}: {name}" for rank, name in enumerate(last)), *output]),
                    pytrace=False)
    for result in found:
        if result is not None and result.verdict is Verdict.NOT_TRIED:
            pytest.skip(result.text)


@pytest.mark.parametrize("clause", [pytest.param(clause, id=function.__name__) for clause, function in
                                    (CLAUSES | OF_USAGE | OF_CAPABILITIES).items()])
def test_clause(clause: str, ranks: int, job: Callable[[str, int], ContractJob]) -> None:
    judge(job("collectives", ranks), clause)


def test_abort_in_a_function(ranks: int, job: Callable[[str, int], ContractJob]) -> None:
    judge(job("collectives", ranks), GRAPH)


def test_abort_eagerly(ranks: int, job: Callable[[str, int], ContractJob]) -> None:
    judge(job("abort", ranks), EAGER)
