"""Flags of horovodrun that tune its engine, and files of flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvkeras.errors import UsageError
from hvkeras.launcher.horovod_flags import TUNING, tuning_variables
from hvkeras.launcher.run_arguments import parse
from hvkeras.settings import IGNORED

FILE = """
verbose: true
params:
  fusion_threshold_mb: 32
  cycle_time_ms: 2.5
  hierarchical_allreduce: true
  hierarchical_allgather: false
autotune:
  enabled: true
  log_file: tuned.csv
timeline:
  filename: line.json
  mark_cycles: true
stall_check:
  enabled: false
  warning_time_seconds: 12
library_options:
  thread_affinity: 1
logging:
  level: INFO
  hide_timestamp: true
"""


def flags(*given: str) -> dict[str, str]:
    return tuning_variables(parse([*given, "-np", "2", "true"]))


def write(folder: Path, text: str) -> str:
    path = folder / "flags.yaml"
    path.write_text(text)
    return str(path)


def test_every_variable_is_one_that_other_engines_name_as_ignored() -> None:
    assert {variable for _, variable in TUNING.values()} <= set(IGNORED)


def test_flags_set_the_variables_of_horovod() -> None:
    assert flags() == {}
    assert flags("--cycle-time-ms", "0.5", "--autotune", "--no-hierarchical-allreduce", "--tcp", "--disable-cache",
                 "--cache-capacity", "0", "--log-without-timestamp") == {
        "HOROVOD_CYCLE_TIME": "0.5", "HOROVOD_AUTOTUNE": "1", "HOROVOD_HIERARCHICAL_ALLREDUCE": "0",
        "NCCL_IB_DISABLE": "1", "HOROVOD_CACHE_CAPACITY": "0", "HOROVOD_LOG_HIDE_TIME": "1"}


def test_a_file_holds_flags(tmp_path: Path) -> None:
    found = parse(["--config-file", write(tmp_path, FILE), "-np", "2", "python", "train.py", "--autotune"])
    assert (found.verbose, found.fusion_threshold_mb, found.timeline_filename) == (True, 32, "line.json")
    assert (found.no_stall_check, found.stall_check_warning_time_seconds, found.log_level) == (True, 12.0, "INFO")
    assert tuning_variables(found) == {
        "HOROVOD_CYCLE_TIME": "2.5", "HOROVOD_HIERARCHICAL_ALLREDUCE": "1", "HOROVOD_HIERARCHICAL_ALLGATHER": "0",
        "HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": "tuned.csv", "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_THREAD_AFFINITY": "1", "HOROVOD_LOG_HIDE_TIME": "1"}
    assert found.command == ["python", "train.py", "--autotune"]


def test_the_command_line_comes_before_the_file(tmp_path: Path) -> None:
    found = parse(["-np", "2", "--cycle-time-ms", "7", "--stall-check", "--no-autotune", "--log-with-timestamp",
                   "--fusion-threshold-mb=64", "--config-file", write(tmp_path, FILE), "true"])
    assert (found.np, found.fusion_threshold_mb, found.no_stall_check) == (2, 64, False)
    assert {"HOROVOD_CYCLE_TIME": "7.0", "HOROVOD_AUTOTUNE": "0", "HOROVOD_LOG_HIDE_TIME": "0"}.items() <= (
        tuning_variables(found).items())


@pytest.mark.parametrize("text", ["", "params:\n", "params:\n  cycle_time_ms:\n"])
def test_a_file_may_be_empty(text: str, tmp_path: Path) -> None:
    assert flags("--config-file", write(tmp_path, text)) == {}


@pytest.mark.parametrize(("text", "words"), [
    ("param:\n  cycle_time_ms: 1\n", r"The sections of a file of flags are params, .* Received: .*section='param'"),
    ("params:\n  cycle_time: 1\n", r"The keys of params are .*cycle_time_ms.* Received: .*key='cycle_time'"),
    ("params: 3\n", r"holds sections .* Received: .*section='params', found=3"),
    ("- params\n", r"holds sections .* Received: .*found=\['params'\]"),
    ("params: {cycle_time_ms: 1\n", r"must be YAML \(.*line 2"),
    ("params:\n  cycle_time_ms: soon\n", r"--cycle-time-ms: invalid .* value: 'soon'"),
    ("params:\n  cache_capacity: -1\n", r"--cache-capacity: a count is 0 or more, not -1"),
    ("controller: gloo\n", r"does not take horovodrun's --gloo"),
])
def test_a_wrong_file_is_explained(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        flags("--config-file", write(tmp_path, text))


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(UsageError, match=r"must be readable \(No such file or directory\)"):
        flags("--config-file", "nowhere.yaml")
