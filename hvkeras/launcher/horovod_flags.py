"""Flags of horovodrun that tune Horovod's engine, and the YAML file of flags (`--config-file`).

The flags set Horovod's environment variables, as horovodrun does. The backend `horovod` applies them. Other backends
report once which of them have no effect.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hvkeras.errors import MachineError, UsageError, explain

_SWITCH = None  # a flag without a value, which also has a --no- form
_Kind = Callable[[str], Any] | None


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"a count is 0 or more, not {text}")
    return value


def _milliseconds(text: str) -> float:
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"a time is 0 or more, not {text}")
    return value


def _noise(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"this is between 0 and 1, not {text}")
    return value


TUNING: dict[str, tuple[_Kind, str]] = {
    "--cycle-time-ms": (_milliseconds, "HOROVOD_CYCLE_TIME"),
    "--cache-capacity": (_count, "HOROVOD_CACHE_CAPACITY"),
    "--hierarchical-allreduce": (_SWITCH, "HOROVOD_HIERARCHICAL_ALLREDUCE"),
    "--hierarchical-allgather": (_SWITCH, "HOROVOD_HIERARCHICAL_ALLGATHER"),
    "--torus-allreduce": (_SWITCH, "HOROVOD_TORUS_ALLREDUCE"),
    "--autotune": (_SWITCH, "HOROVOD_AUTOTUNE"),
    "--autotune-log-file": (str, "HOROVOD_AUTOTUNE_LOG"),
    "--autotune-warmup-samples": (_count, "HOROVOD_AUTOTUNE_WARMUP_SAMPLES"),
    "--autotune-steps-per-sample": (_count, "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE"),
    "--autotune-bayes-opt-max-samples": (_count, "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES"),
    "--autotune-gaussian-process-noise": (_noise, "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE"),
    "--timeline-mark-cycles": (_SWITCH, "HOROVOD_TIMELINE_MARK_CYCLES"),
    "--mpi-threads-disable": (_SWITCH, "HOROVOD_MPI_THREADS_DISABLE"),
    "--num-nccl-streams": (_count, "HOROVOD_NUM_NCCL_STREAMS"),
    "--thread-affinity": (_count, "HOROVOD_THREAD_AFFINITY"),
    "--gloo-timeout-seconds": (_count, "HOROVOD_GLOO_TIMEOUT_SECONDS"),
    "--log-hide-timestamp": (_SWITCH, "HOROVOD_LOG_HIDE_TIME"),
}

# The sections of the file: each maps its keys to flags, without the leading dashes.
_SECTIONS: dict[str, dict[str, str]] = {
    "params": {name: name for name in ("fusion_threshold_mb", "cycle_time_ms", "cache_capacity",
                                       "hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce")},
    "autotune": {"enabled": "autotune", **{name: f"autotune_{name}" for name in (
        "log_file", "warmup_samples", "steps_per_sample", "bayes_opt_max_samples", "gaussian_process_noise")}},
    "timeline": {"filename": "timeline_filename", "mark_cycles": "timeline_mark_cycles"},
    "stall_check": {"enabled": "stall_check", "warning_time_seconds": "stall_check_warning_time_seconds",
                    "shutdown_time_seconds": "stall_check_shutdown_time_seconds"},
    "library_options": {name: name for name in ("mpi_threads_disable", "num_nccl_streams", "thread_affinity",
                                                "gloo_timeout_seconds")},
    "logging": {"level": "log_level", "hide_timestamp": "log_hide_timestamp", "with_timestamp": "log_with_timestamp"},
}


def add_tuning_flags(parser: argparse.ArgumentParser) -> None:
    """Add the tuning flags to a parser."""
    group = parser.add_argument_group("Horovod's own engine (--backend horovod)")
    for flag, (kind, variable) in TUNING.items():
        if kind is _SWITCH:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, help=f"Set {variable}.")
        else:
            group.add_argument(flag, type=kind, metavar="TEXT" if kind is str else "N", help=f"Set {variable}.")
    group.add_argument("--log-with-timestamp", dest="log_hide_timestamp", action="store_false", default=None,
                       help=argparse.SUPPRESS)
    group.add_argument("--log-without-timestamp", dest="log_hide_timestamp", action="store_true", default=None,
                       help=argparse.SUPPRESS)
    group.add_argument("--tcp", action="store_true", help="Set NCCL_IB_DISABLE.")


def tuning_variables(flags: argparse.Namespace) -> dict[str, str]:
    """Return the variables that the given flags set."""
    given = {variable: getattr(flags, flag[2:].replace("-", "_")) for flag, (_, variable) in TUNING.items()}
    found = {name: str(int(value)) if isinstance(value, bool) else str(value)
             for name, value in given.items() if value is not None}
    return {**found, "NCCL_IB_DISABLE": "1"} if flags.tcp else found


def flags_of_file(path: str) -> list[str]:
    """Read a YAML file of flags, in horovodrun's format, and return them as command-line arguments.

    Example:
        A file of `stall_check: {enabled: false}` gives `["--no-stall-check"]`.

    Raises:
        MachineError: PyYAML is not installed.
        UsageError: The file cannot be read, or has other content than horovodrun's files.
    """
    try:
        import yaml
    except ImportError:
        raise MachineError(explain("--config-file needs PyYAML", "pip install pyyaml", config_file=path)) from None
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
    except OSError as error:
        raise UsageError(explain(f"The file of flags must be readable ({error.strerror})", "check its name",
                                 config_file=path)) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(explain(f"The file of flags must be YAML ({' '.join(str(error).split())})", "fix that line",
                                 config_file=path)) from None
    return list(_as_flags(content, path))


def _as_flags(content: Any, path: str) -> Iterator[str]:
    for name, section in _mapping({} if content is None else content, "", path).items():
        if name == "verbose":
            yield from ["--verbose"] if section else []
        elif name == "controller":
            yield f"--{section}"
        elif name not in _SECTIONS:
            raise UsageError(explain(f"The sections of a file of flags are {', '.join(_SECTIONS)}", "rename it, or"
                                     " remove it", config_file=path, section=name))
        else:
            for key, value in _mapping({} if section is None else section, name, path).items():
                yield from _flag(name, key, value, path)


def _mapping(found: Any, section: str, path: str) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        raise UsageError(explain("A file of flags holds sections with one `key: value` per line", "indent the keys"
                                 " below their section", config_file=path, **({"section": section} if section else {}),
                                 found=found))
    return found


def _flag(section: str, key: str, value: Any, path: str) -> list[str]:
    if key not in _SECTIONS[section]:
        raise UsageError(explain(f"The keys of {section} are {', '.join(_SECTIONS[section])}", "rename it, or remove"
                                 " it", config_file=path, key=key))
    flag = _SECTIONS[section][key].replace("_", "-")
    if value is None:
        return []
    if not isinstance(value, bool):
        return [f"--{flag}={value}"]
    if flag == "log-with-timestamp":
        return [f"--log-with{'' if value else 'out'}-timestamp"]
    return [f"--{flag}" if value else f"--no-{flag}"]
