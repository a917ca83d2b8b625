"""Keras's own tests in each rank of a job of two: what passes in one process passes there, or is listed with a reason.

Every optimizer that they compile a model with, or apply, is distributed. All ranks have the same seeds and the same
data, so that averages are exact and each expectation must hold as it stands. `exceptions.yaml` lists what fails
nevertheless: a test that fails and is not listed fails here, and so does an entry whose tests all pass.

What fails in a job is run again in one process without hvkeras. What fails there too, mostly for want of a package or
of a file that Keras does not install, is not ours.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness import LaunchError, Outcome

WORKER = Path(__file__).parent / "workers" / "run_tests.py"
EXCEPTIONS = Path(__file__).with_name("exceptions.yaml")
# What Keras's tests import, apart from the environment's own: see the Makefile.
PACKAGES = Path(sys.prefix) / "keras_suite"
KERAS = Path(find_spec("keras").origin).parent / "src"  # type: ignore[union-attr, arg-type]
SUMMARY = "keras_suite"  # the property that conftest.py prints
NP = 2
_JOBS = 30  # that a group may take: each goes on after the test that has ended the one before
_DEADLINE = 1800.0
pytestmark = pytest.mark.timeout(3600)
_APART = "another rank does not end this test"
_OF_RANKS = {"HVKERAS_STALL_SHUTDOWN": "60"}

# Folders and files of Keras, in groups that take minutes each.
GROUPS = {
    "trainers": ("trainers",),
    "callbacks": ("callbacks", "distillation"),
    "optimizers": ("optimizers",),
    "models": ("models",),
    "saving": ("saving", "legacy", "export/saved_model_test.py"),
    "losses and metrics": ("losses", "metrics", "regularizers", "constraints", "initializers"),
    "backend": ("backend/tensorflow", "dtype_policies", "quantizers"),
    "core layers": ("layers/core", "layers/attention", "layers/layer_test.py"),
    "convolutional layers": ("layers/convolutional", "layers/pooling"),
    "recurrent layers": ("layers/rnn",),
    "further layers": ("layers/activations", "layers/merging", "layers/normalization", "layers/regularization",
                       "layers/reshaping"),
    "preprocessing layers": ("layers/preprocessing",),
}


@dataclass(frozen=True)
class Variant:
    """How the tests are run.

    Attributes:
        name: What it is called in the list of exceptions.
        backend: The engine.
        options: Arguments of `DistributedOptimizer`.
        sample: One in how many tests is run.
        data_parallel: Whether the ranks carry out together what one process would.
    """

    name: str
    backend: str
    options: dict[str, Any] = field(default_factory=dict)
    sample: int = 1
    data_parallel: bool = False


WHOLE = Variant("whole", "native")
SAMPLES = (
    Variant("horovod", "horovod", sample=8),
    Variant("tfdist", "tfdist", sample=8),
    Variant("sharded", "native", {"shard_update": True}, sample=4),
    Variant("compiled", "native", {"compile_update": True}, sample=4),
)
AS_ONE_PROCESS = Variant("as one process", "native", data_parallel=True)
OF_STEPS = ("trainers", "losses and metrics", "core layers", "convolutional layers", "recurrent layers",
            "further layers", "preprocessing layers")
OF_SAMPLES = ("trainers", "callbacks", "optimizers", "models", "saving")

Launch = Callable[..., Outcome]
Note = dict[str, Any]
Record = Callable[[str, str], None]


@dataclass(frozen=True)
class Entry:
    """Tests that may fail.

    Attributes:
        pattern: Of their names.
        rank: The rank on which they may; None for any.
        error: What the error must contain.
    """

    pattern: str
    rank: int | None
    error: str

    def allows(self, note: Note) -> bool:
        """Whether a failed test is one of them."""
        return (fnmatch.fnmatchcase(note["test"], self.pattern) and self.rank in (None, note["rank"])
                and self.error in note["reason"])


@dataclass
class Judgement:
    """What became of the tests of a group.

    Attributes:
        found: The outcome of each test in the job, as of the rank where it is worst.
        alone: The outcome in one process, for those that failed.
        listed: What may fail.
    """

    found: dict[str, Note]
    alone: dict[str, Note]
    listed: list[Entry]

    def broken(self) -> dict[str, Note]:
        """What passes alone and fails in the job."""
        return {test: note for test, note in self.found.items() if note["outcome"] == "failed"
                and self.alone.get(test, {}).get("outcome") != "failed"}

    def unlisted(self) -> list[str]:
        """What of this is not listed, with the end of the error."""
        return [f"{test} on rank {note['rank']}:\n{note['reason']}" for test, note in self.broken().items()
                if not any(entry.allows(note) for entry in self.listed)]

    def outdated(self) -> list[str]:
        """The entries of the list of which no test fails any more."""
        return [entry.pattern for entry in self.listed
                if fnmatch.filter(self.found, entry.pattern) and not any(map(entry.allows, self.broken().values()))]

    def summary(self) -> str:
        """The numbers."""
        count = Counter(note["outcome"] for note in self.found.values())
        trained = sum(1 for note in self.found.values() if note.get("distributed"))
        broken, unlisted = len(self.broken()), len(self.unlisted())
        return (f"{len(self.found)} tests, {trained} with distributed optimizers: {count['passed']} passed,"
                f" {count['skipped']} skipped, {count['failed'] - broken} fail alone as well,"
                f" {broken - unlisted} are listed, {unlisted} are not")


class Runner:
    """Runs Keras's tests in jobs, or alone.

    Args:
        launch: Starts a job.
        folder: For what the ranks note.
        request: What is asked of each of them.
    """

    def __init__(self, launch: Launch, folder: Path, request: Note) -> None:
        self._launch, self._folder, self._request = launch, folder, request

    def judge(self, variant: Variant) -> Judgement:
        """Runs tests in a job, and alone what failed there."""
        asked = {"options": variant.options, "sample": variant.sample, "data_parallel": variant.data_parallel}
        found = self._run(asked, NP, launcher="hvkeras_run",
                          backend=variant.backend, env=_OF_RANKS)
        failed = sorted(test for test, note in found.items() if note["outcome"] == "failed")
        files = sorted({test.split("::")[0] for test in failed})
        alone = self._run({"alone": True, "only": failed, "paths": files}, 1, launcher="none") if failed else {}
        return Judgement(found, alone, listed(variant.name))

    def _run(self, asked: Note, np: int, launcher: str, **options: Any) -> dict[str, Note]:
        found: dict[str, Note] = {}
        for number in range(_JOBS):
            folder = self._folder / f"{launcher}.{number}"
            folder.mkdir()
            request, said = folder / "request.json", ""
            request.write_text(json.dumps({**self._request, **asked, "done": sorted(found), "notes": str(folder)}))
            try:
                self._launch(launcher, WORKER, (str(request),), np=np, deadline=_DEADLINE, **options)
            except LaunchError as error:
                said = str(error)
            ranks = [list(_notes(folder / f"rank.{rank}.jsonl")) for rank in range(np)]
            new = _worst(ranks, said)
            found |= new
            if all(notes and notes[-1].get("complete") for notes in ranks):
                return found
            assert new, f"no test was begun: {said}"
        raise AssertionError(f"{_JOBS} jobs were not enough; the tests so far: {json.dumps(found)[-3000:]}")


def listed(variant: str) -> list[Entry]:
    """Reads what may fail."""
    return [Entry(pattern, entry.get("rank"), entry.get("error", "")) for pattern, entry in _entries()
            if variant in entry.get("in", [variant])]


def _entries() -> list[tuple[str, Note]]:
    return [(pattern, entry) for entry in yaml.safe_load(EXCEPTIONS.read_text()) for pattern in entry["tests"]]


def _notes(path: Path) -> Iterator[Note]:
    if path.exists():
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # the last one of a rank that was killed
                yield json.loads(line)


def _worst(ranks: list[list[Note]], said: str) -> dict[str, Note]:
    """The outcome of each test on the rank where it is worst; a test that a rank has not ended has failed.

    Where one rank has failed, the other raises when it waits for it, which says nothing about the test.
    """
    found: dict[str, Note] = {}
    for rank, notes in enumerate(ranks):
        ended = {note["test"]: note for note in notes if "test" in note}
        for test in [note["began"] for note in notes if "began" in note]:
            unfinished = {"test": test, "outcome": "failed", "reason": f"the job ended in it: {said[-4000:]}"}
            note = {"rank": rank, **ended.pop(test, unfinished)}
            if not note.get("together", True):
                note |= {"outcome": "failed", "reason": note["reason"] or _APART}
            ended[test] = note
        for test, note in ended.items():
            if test not in found or _badness(note) > _badness(found[test]):
                found[test] = {"rank": rank, **note}
    return found


def _badness(note: Note) -> int:
    if note["outcome"] != "failed":
        return 0
    return 1 if note["reason"] == _APART or "MismatchError: " in note["reason"] else 2


@pytest.fixture
def runner(group: str, tmp_path: Path, launch: Launch) -> Runner:
    return Runner(launch, tmp_path, {"root": str(KERAS), "packages": [str(PACKAGES)], "paths": GROUPS[group],
                                     "trains": "layers" in group})


@pytest.mark.parametrize("group", GROUPS)
def test_what_passes_alone_passes_in_a_job(group: str, runner: Runner, record_property: Record) -> None:
    found = runner.judge(WHOLE)
    record_property(SUMMARY, found.summary())
    assert not found.unlisted(), "\n\n".join(found.unlisted())
    assert not found.outdated(), f"these pass: take them out of {EXCEPTIONS.name}: {found.outdated()}"
    assert any(note.get("distributed") for note in found.found.values())


@pytest.mark.parametrize("group", OF_STEPS)
def test_what_passes_alone_passes_when_ranks_share_its_steps(group: str, runner: Runner, record_property: Record,
                                                             ) -> None:
    found = runner.judge(AS_ONE_PROCESS)
    record_property(SUMMARY, found.summary())
    assert not found.unlisted(), "\n\n".join(found.unlisted())


@pytest.mark.parametrize("group", OF_SAMPLES)
@pytest.mark.parametrize("variant", SAMPLES, ids=lambda variant: variant.name)
def test_a_sample_passes_too(variant: Variant, group: str, runner: Runner, record_property: Record) -> None:
    found = runner.judge(variant)
    record_property(SUMMARY, found.summary())
    assert not found.unlisted(), "\n\n".join(found.unlisted())


def test_every_entry_is_of_a_test() -> None:
    files = {str(path.relative_to(KERAS)) for path in KERAS.rglob("*_test.py")}
    assert [pattern for pattern, _ in _entries() if not fnmatch.filter(files, pattern.split("::")[0])] == []


OF_OUR_OWN = """
import os
import hvkeras as hvd

def test_before():
    pass

def test_one_rank_leaves():
    assert hvd.rank() == 1
    hvd.allreduce([1.0])

def test_one_rank_ends():
    if hvd.rank() == 1:
        os._exit(3)

def test_after():
    assert hvd.allreduce([1.0]) == [1.0]
"""


def test_what_one_rank_does_alone_costs_one_test(tmp_path: Path, launch: Launch) -> None:
    root, folder = tmp_path / "root", tmp_path / "notes"
    for path in (root, folder):
        path.mkdir()
    (root / "own_test.py").write_text(OF_OUR_OWN)
    found = Runner(launch, folder, {"root": str(root), "packages": [], "paths": ["own_test.py"]}).judge(WHOLE).found
    assert [note["outcome"] for note in found.values()] == ["passed", "failed", "failed", "passed"], found
    assert "assert 0 == 1" in found["own_test.py::test_one_rank_leaves"]["reason"]
    assert "the job ended in it" in found["own_test.py::test_one_rank_ends"]["reason"]
