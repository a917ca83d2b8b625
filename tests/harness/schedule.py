"""Groups of tests for pytest-xdist, and their order: the longest group starts first.

Tests that share a launch (`launch_once`) or a module fixture form a group, which one worker of pytest-xdist runs. Other
tests with ranks are separate groups, and the unit tests of a file are one group. Groups are ordered by their durations
in `times.json`, which `pytest --write-times` writes.
"""

from __future__ import annotations

import json
import os
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from harness.checks import names_of_checks

TIMES = Path(__file__).with_name("times.json")
_BUILT_WITHIN = 800.0  # seconds that a test waits for the build of Horovod
_SHORT = 2.0  # seconds; shorter groups are not in the file
# Parts of the names of tests that need Horovod.
_NEED_HOROVOD = ("horovod", "gloo", "test_the_chief_is_rank_0", "test_failures_are_rows", "test_this_machine_is_fit",
                 "test_ranks_must_ask_for_one_backend", "test_check_build", "test_a_loop_of_ones_own_is_compared",
                 "test_a_machine_without_tensorflow")
# Unit tests that take too long for `make check`, because they start processes or train several times.
_LONG = ("test_native_core", "test_harness", "test_build_horovod", "real_launchers", "test_checkpoints",
         "test_optimizer", "test_compiled_update", "test_recorder", "test_tensorboard", "test_callbacks",
         "test_elastic", "test_comparison_report", "test_brute_force", "test_mutants", "test_packaging",
         "test_report", "test_steps", "the_launcher_starts_one")
# Parameters that tests pass to `launch_once`. Other parameters select assertions on the same outcome.
_JOB_PARAMETERS = ("outcome", "whole", "run", "launcher", "backend", "engine", "np", "keras", "script")


def group_of(item: pytest.Function) -> str:
    """Return the group of a test."""
    file = item.location[0]
    shared = [name for name, definitions in item._fixtureinfo.name2fixturedefs.items()
              if definitions[-1].scope == "module" and name in item.fixturenames]
    callspec = getattr(item, "callspec", None)
    if "launch_once" in item.fixturenames and not shared:
        values = {name: str(value) for name, value in (callspec.params.items() if callspec else ())}
        return "::".join([file, *(values[name] for name in _JOB_PARAMETERS if name in values)])
    if shared or "unit" in Path(file).parts:
        return file
    return f"{file}::{item.name}"


def strings_of(item: pytest.Function) -> set[str]:
    """Return the strings in a test's code and parameters, which include the names of the checks that it reads."""
    callspec = getattr(item, "callspec", None)
    parameters = callspec.params.values() if callspec else ()
    return {*_strings(item.function.__code__), *(value for value in parameters if isinstance(value, str))}


def _strings(code: types.CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _strings(constant)
        elif isinstance(constant, (tuple, frozenset)):
            yield from (each for each in constant if isinstance(each, str))
        elif isinstance(constant, str):
            yield constant


def wanted_checks(script: Path, group: str, items: Sequence[pytest.Item]) -> list[str] | None:
    """Return the checks of a worker script whose results the tests of a group read; None if that is unknown.

    Args:
        script: The script.
        group: The group.
        items: All tests of the session.
    """
    names = set(names_of_checks(script)) if script.suffix == ".py" else set()
    found: set[str] = set()
    for item in items:
        if isinstance(item, pytest.Function) and group_of(item) == group:
            read = names & strings_of(item)
            if not read:
                return None
            found |= read
    return sorted(found) if found else None


def arrange(items: list[pytest.Item]) -> None:
    """Mark the unit tests, and sort the groups: the longest first, but those that need Horovod last."""
    times: dict[str, float] = json.loads(TIMES.read_text()) if TIMES.exists() else {}
    groups = [group_of(item) if isinstance(item, pytest.Function) else item.nodeid for item in items]
    for item in items:
        file = Path(item.location[0])
        unit = "unit" in file.parts
        if unit and not any(name in item.nodeid for name in _LONG):
            item.add_marker("check")
        if not any(name in item.nodeid for name in _NEED_HOROVOD):
            item.add_marker("early")
    late = {groups[index] for index, item in enumerate(items) if not item.get_closest_marker("early")}
    first = {group: index for index, group in reversed(list(enumerate(groups)))}
    order = sorted(range(len(items)), key=lambda index: (groups[index] in late, -times.get(groups[index], 0.0),
                                                         first[groups[index]], index))
    items[:] = [items[index] for index in order]


def wait_for_horovod(built: Path) -> None:
    """Wait until Horovod is built.

    Args:
        built: The file that exists after the build; `<name>.failed` exists after a failed build.
    """
    ends = time.monotonic() + _BUILT_WITHIN
    while not built.exists():
        failed = built.with_name(f"{built.name}.failed")
        if failed.exists() or time.monotonic() > ends:
            pytest.fail("Horovod was not built", pytrace=False)
        time.sleep(0.5)


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist's types are not exported
    """Scheduler that assigns whole groups to xdist's workers, in the order of the collection.

    xdist's `--dist loadgroup` appends the group to the test's id, which pytest 9 no longer accepts.
    """

    def __init__(self, config: pytest.Config, log: Any, folder: Path) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)
        self._folder = folder
        self._groups: dict[str, str] = {}

    def _split_scope(self, nodeid: str) -> str:
        if not self._groups:
            self._groups = json.loads(next(self._folder.glob("*.groups")).read_text())
        return self._groups[nodeid]


def write_groups(items: Sequence[pytest.Item], folder: Path) -> None:
    """Write the group of each test to a file for the scheduler, which only receives the tests' ids."""
    groups = {item.nodeid: group_of(item) if isinstance(item, pytest.Function) else item.nodeid for item in items}
    path = folder / f"{os.environ['PYTEST_XDIST_WORKER']}.groups"
    path.with_suffix(".new").write_text(json.dumps(groups))
    path.with_suffix(".new").rename(path)


def write_times(seconds: Mapping[str, float]) -> None:
    """Write the seconds of each group that has run; the entries of other groups remain."""
    known: dict[str, float] = json.loads(TIMES.read_text()) if TIMES.exists() else {}
    known = {group: time for group, time in known.items() if group not in seconds}
    known |= {group: round(time, 1) for group, time in seconds.items() if time >= _SHORT}
    TIMES.write_text(json.dumps(dict(sorted(known.items())), indent=0) + "\n")
