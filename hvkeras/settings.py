"""All settings of hvkeras in one table: name, type, default, help and Horovod's variable.

A setting is an environment variable `HVKERAS_<NAME>`. Some settings also accept Horovod's variable; ours takes
precedence. Unknown `HVKERAS_*` variables and invalid values are errors. This file and
`hvkeras.control.launch_environments` are the only readers of the environment.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hvkeras.errors import UsageError, explain

PREFIX = "HVKERAS_"
COMPRESSIONS = ("none", "fp16", "bf16", "int8")
_UNITS = {"": 1, "B": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "KIB": 1024, "MIB": 1024**2, "GIB": 1024**3}
_BITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
LONGEST_TRACE = 10_000  # maximum steps of a window: each adds a few kilobytes to the trace
SHORTEST_SILENCE = 1.0  # seconds: ranks send a heartbeat every half second, the server every second
SHORTEST_SECRET = 16  # bytes
NEW_SECRET = 'python -c "import secrets; print(secrets.token_hex())"'  # prints a secret
LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


def _seconds(text: str) -> float:
    value = float(text.strip().removesuffix("s"))
    if not value >= 0:  # NaN fails as well
        raise ValueError("a duration must not be negative")
    return value


def _timeout(text: str) -> float:
    value = _seconds(text)
    if value == 0:
        raise ValueError("a deadline must be more than 0 s")
    return value


def _silence(text: str) -> float:
    value = _seconds(text)
    if value < SHORTEST_SILENCE:
        raise ValueError(f"heartbeats are sent every second, so it must be {SHORTEST_SILENCE:g} s or more")
    return value


def size_in_bytes(text: str) -> int:
    """Parse a size such as `64MB` or `25MiB`; return bytes.

    Raises:
        ValueError: The text is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError("a size must be a number and one of B, KB, MB, GB, KiB, MiB, GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def bandwidth_in_bytes(text: str) -> float:
    """Parse a rate such as `10Gbit`, `25Gbps` or `1.25GB/s`; return bytes per second.

    Raises:
        ValueError: The text is not a rate.
    """
    bits = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(?:[bB]it(?:/s|ps)?|bps)\s*", text)
    bytes_ = re.fullmatch(r"(.*B)(?:/s|ps)?\s*", text)  # 10Gb may mean bits, and a bare number is ambiguous
    value = 0.0
    if bits is not None:
        value = float(bits[1]) * _BITS.get(bits[2].lower(), 1.0) / 8
    elif bytes_ is not None:
        with contextlib.suppress(ValueError):
            value = float(size_in_bytes(bytes_[1]))
    if not value:
        raise ValueError("a bandwidth must be a positive number with kbit, Mbit, Gbit, KB, MB or GB (per second), such"
                         " as 10Gbit")
    return value


def duration_in_seconds(text: str) -> float:
    """Parse a time with its unit, such as `50us` or `1ms`; return seconds.

    Raises:
        ValueError: The text is not a time.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ns|us|µs|ms|s)\s*", text)
    if match is None:
        raise ValueError("a time must be a number with ns, us, ms or s, such as 50us")
    return float(match[1]) * _SECONDS[match[2].replace("µ", "u")]


def _network_costs(text: str) -> tuple[float, float]:
    latency, comma, bandwidth = text.partition(",")
    if not comma:
        raise ValueError("it must be a latency and a bandwidth, such as 25us,10Gbit")
    return duration_in_seconds(latency), bandwidth_in_bytes(bandwidth)


def _switch(text: str) -> bool:
    value = text.strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("0", "false", "no", "off"):
        return False
    raise ValueError("a switch must be on or off")


def _one_of(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        name = text.strip().lower()
        if name not in names:
            raise ValueError(f"it must be {', '.join(names[:-1])} or {names[-1]}")
        return name

    return parse


def _compile_update(text: str) -> bool | str:
    try:
        return "auto" if text.strip().lower() == "auto" else _switch(text)
    except ValueError:
        raise ValueError("it must be auto, on or off") from None


def _timeline(text: str) -> str:
    return "" if text == "DYNAMIC" else text  # Horovod's value for a timeline that starts with start_timeline()


def window_of_steps(text: str) -> tuple[int, int]:
    """Parse a window of steps such as `100:120`, which excludes the last number.

    Raises:
        ValueError: The text is not a window.
    """
    first, colon, after = (part.strip() for part in text.partition(":"))
    if not colon or not after.isdecimal() or (first and not first.isdecimal()):
        raise ValueError("a window of steps must be two numbers, A:B, for the steps from A to B-1")
    window = (int(first or 0), int(after))
    if not 0 < window[1] - window[0] <= LONGEST_TRACE:
        raise ValueError(f"a window must hold 1 to {LONGEST_TRACE:,} steps, from A to B-1")
    return window


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError("it must not be negative")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError("it must be a positive number")
    return value


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _modules(text: str) -> tuple[str, ...]:
    names = _names(text)
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise ValueError("it must be names of Python modules, separated by commas, such as tensorflow,keras")
    return names


def _log_level(text: str) -> str:
    level = text.strip().upper()
    if level not in LOG_LEVELS:
        raise ValueError(f"a log level must be one of {', '.join(LOG_LEVELS)}")
    return level


def _secret(text: str) -> str:
    size = len(text.strip().encode(errors="surrogateescape"))
    if size < SHORTEST_SECRET:
        raise UsageError(explain(
            f"{PREFIX}SECRET must have at least {SHORTEST_SECRET} bytes, so that nobody can guess it",
            f"run {NEW_SECRET} once, and set what it prints on every worker", bytes=size))
    return text


@dataclass(frozen=True)
class Setting:
    """One row of the table.

    Attributes:
        name: Name without the prefix, in lower case; also the attribute of `Settings`.
        parse: Converts the text to a value, or raises ValueError; UsageError if the error must not show the text.
        default: Value if neither variable is set.
        help: One sentence for docs/settings.md.
        horovod: Horovod's variable for the same setting, or "".
        internal: Whether launchers set it, so that it is not documented for users.
    """

    name: str
    parse: Callable[[str], Any]
    default: Any
    help: str
    horovod: str = ""
    internal: bool = False

    @property
    def variable(self) -> str:
        """Environment variable of the setting."""
        return PREFIX + self.name.upper()


TABLE: tuple[Setting, ...] = (
    Setting("backend", str, "auto", "Collective engine: auto, native, horovod, tfdist, local or a plug-in's name."),
    Setting("start_timeout", _timeout, 60.0, "Seconds that ranks wait for each other at startup, and for the process"
            " that forks them (`--preload`).", horovod="HOROVOD_START_TIMEOUT"),
    Setting("spark_start_timeout", _timeout, 600.0, "Seconds that `hvkeras.spark` waits for Spark to start all of a"
            " job's tasks.", horovod="HOROVOD_SPARK_START_TIMEOUT"),
    Setting("liveness_timeout", _silence, 15.0, "Seconds without a heartbeat after which a rank counts as lost."),
    Setting("relay_from", _count, 64, "Number of ranks from which on, in jobs on several hosts, the ranks of a host"
            " share one connection to the control channel (a relay); 0 for never."),
    Setting("stall_warning", _seconds, 60.0, "Seconds that a rank waits in a collective, or makes no progress in fit,"
            " before a warning names the stragglers and their collectives.",
            horovod="HOROVOD_STALL_CHECK_TIME_SECONDS"),
    Setting("stall_shutdown", _seconds, 600.0, "Seconds that a rank waits in a collective, or makes no progress in"
            " fit, before the job ends; 0 waits forever.", horovod="HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"),
    Setting("mismatch_after", _seconds, 3.0, "Seconds that ranks wait for each other in different collectives"
            " before all of them raise an error."),
    Setting("exit_grace", _seconds, 3.0, "Seconds that a surviving rank has to unwind after another rank failed."),
    Setting("log_level", _log_level, "WARNING", "What hvkeras, TensorFlow and Horovod print: TRACE, DEBUG, INFO,"
            " WARNING, ERROR or FATAL.", horovod="HOROVOD_LOG_LEVEL"),
    Setting("full_traceback", _switch, False, "Whether tracebacks show all frames, also those of hvkeras, Keras and"
            " TensorFlow."),
    Setting("threads", _switch, True, "Whether the number of TensorFlow's threads defaults to the rank's fair share of"
            " the cores."),
    Setting("gpu_placement", _switch, True, "Whether init() assigns each rank the GPU of its local rank, with memory"
            " growth, unless the script has chosen GPUs before."),
    Setting("bucket_size", size_in_bytes, None, "Bytes of gradients fused into one collective (for example 64MiB). The"
            " default is 25MiB, and with native between hosts what the network carries in 8 ms, rounded to a power of"
            " two from 512KiB to 16MiB.",
            horovod="HOROVOD_FUSION_THRESHOLD"),
    Setting("compression", _one_of(*COMPRESSIONS), "none", "How optimizers and tapes compress gradients: none, fp16,"
            " bf16, or int8 between hosts; DistributedOptimizer(compression=...) takes precedence."),
    Setting("compile_update", _compile_update, "auto", "Whether XLA compiles the optimizer's update within the step:"
            " on, off, or auto (where this is faster); DistributedOptimizer(compile_update=...) takes precedence."),
    Setting("shard_update", _switch, False, "Whether each rank stores and updates only a shard of the optimizer's"
            " state; DistributedOptimizer(shard_update=...) takes precedence."),
    Setting("gradients", _one_of("auto", "exact", "horovod"), "auto", "Gradients of allgather, broadcast and"
            " reducescatter: exact, or scaled by the number of ranks as in Horovod (horovod); auto is horovod under"
            " --as-horovod."),
    Setting("uneven", _one_of("trim", "join", "error"), "trim", "Behavior of fit if ranks have different numbers"
            " of batches: trim to the smallest number, join (continue with zero weight), or error."),
    Setting("guard", _switch, True, "Whether fit checks that all ranks have the same weights."),
    Setting("guard_steps", _positive, 200, "Steps between two such checks; fit also checks after the first step and at"
            " the end of each epoch."),
    Setting("average_statistics", _switch, True, "Whether fit averages moving statistics over the ranks, before"
            " validation and at the end of an epoch: those of BatchNormalization, and registered ones."),
    Setting("data_parallel", _switch, False, "Whether a script for one process trains on all ranks, without edits; set"
            " by `--data-parallel`."),
    Setting("data_parallel_process", int, None, "Process ID of the rank under `--data-parallel`, set by the rank"
            " itself, so that its child processes do not train.", internal=True),
    Setting("data_parallel_folders", str, "", "Private folders of the rank under `--data-parallel`.", internal=True),
    Setting("sync_batch_norm", _switch, True, "No effect: under `--data-parallel`, BatchNormalization always uses the"
            " mean and variance of the whole batch, as in one process."),
    Setting("network_interfaces", _names, (), "Network interfaces that hvkeras listens on and announces, separated by"
            " commas."),
    Setting("network_costs", _network_costs, None, "Latency and bandwidth between hosts, such as 25us,10Gbit, from"
            " which backend native chooses its algorithms; measured at the start by default."),
    Setting("preload", _modules, (), "Python modules, separated by commas, that each host imports once, before it forks"
            " its ranks; same as `hvkeras run --preload`."),
    Setting("secret", _secret, "", "The job's secret, 16 bytes or more, equal on all ranks; required on several hosts"
            " by jobs of TF_CONFIG, torchrun and Kubernetes."),
    Setting("rendezvous_dir", str, "", "Private folder, shared by all hosts, for the secret of jobs of TF_CONFIG,"
            " torchrun and Slurm."),
    Setting("kubernetes_size", int, None, "Number of pods of a Kubernetes Indexed Job that train together."),
    Setting("kubernetes_service", str, "", "Headless service of these pods; append :port for a rendezvous port other"
            " than 29400."),
    Setting("timeline", _timeline, "", "File for a timeline of rank 0's collectives; with {rank} in its name, one file"
            " per rank.", horovod="HOROVOD_TIMELINE"),
    Setting("trace_steps", window_of_steps, None, "Window of steps to trace on all ranks: 100:120 is steps 100 to 119,"
            " counted from 0 at the start of training."),
    Setting("trace_file", str, "trace.json", "File for the merged trace; each rank writes its own trace beside it,"
            " such as trace.rank.0.json."),
    Setting("elastic_dir", str, "", "Private folder where rank 0 stores the commits of hvd.elastic, to resume after a"
            " restart; `hvkeras run --reset-limit` creates one."),
    Setting("leave_grace", _timeout, 25.0, "Seconds after SIGTERM for ranks to save a checkpoint, or to leave an"
            " elastic job, before they are terminated."),
    Setting("report", str, "", "Folder for the ranks' records of the job, and for the report that is written when it"
            " ends; same as `hvkeras run --report`."),
    Setting("run_rank", int, None, "Rank, set by `hvkeras run`.", internal=True),
    Setting("run_size", int, None, "Number of ranks, set by `hvkeras run`.", internal=True),
    Setting("run_local_rank", int, None, "Local rank, set by `hvkeras run`.", internal=True),
    Setting("run_local_size", int, None, "Ranks on this host, set by `hvkeras run`.", internal=True),
    Setting("run_control", str, None, "host:port of the control channel, set by `hvkeras run`.", internal=True),
    Setting("run_launcher", str, "", "Launcher that serves the control channel, if not `hvkeras run`.", internal=True),
    Setting("run_cause", str, "", "File for the cause of the job's end, written by ranks.", internal=True),
    Setting("run_membership", str, "", "host:port of an elastic job's membership channel, set by `hvkeras run`.",
            internal=True),
    Setting("run_worker", int, None, "Number of this worker in an elastic job, set by `hvkeras run`.", internal=True),
    Setting("run_standby", str, "", "When this worker joins a running elastic job: at a `commit`, with its model built,"
            " or at its `start`, in hvd.init(); set by `hvkeras run`.", internal=True),
    Setting("run_handover", str, "", "File descriptor of the commits that this process retained during a restart of"
            " its program, and the number of the last commit.", internal=True),
    Setting("run_commits", _switch, False, "Whether `hvkeras run` removes the commits of hvd.elastic.", internal=True),
    Setting("spark_rank", int, None, "Rank, set by `hvkeras.spark`.", internal=True),
    Setting("spark_size", int, None, "Number of ranks, set by `hvkeras.spark`.", internal=True),
    Setting("spark_local_rank", int, None, "Local rank, set by `hvkeras.spark`.", internal=True),
    Setting("spark_local_size", int, None, "Ranks on this host, set by `hvkeras.spark`.", internal=True),
    Setting("spark_control", str, None, "host:port of the control channel, set by `hvkeras.spark`.", internal=True),
    Setting("horovod_numbers", str, "", "Launcher that has set HOROVOD_RANK and similar variables, if not horovodrun.",
            internal=True),
    Setting("record", str, "", "Folder for the ranks' records, set by `hvkeras compare`.", internal=True),
)


# Settings of the whole job: all ranks use the value of rank 0.
SHARED = ("liveness_timeout", "stall_warning", "stall_shutdown", "mismatch_after", "exit_grace", "bucket_size",
          "compression", "compile_update", "shard_update", "gradients", "uneven", "guard", "guard_steps",
          "average_statistics", "sync_batch_norm")

_CYCLES = "there are no cycles of negotiation to tune"
_TUNED_BY_ITSELF = "the engine tunes itself"
# Variables of Horovod's engine, and why the other engines ignore them, without those that its launchers set.
IGNORED = {
    **dict.fromkeys(("HOROVOD_CYCLE_TIME", "HOROVOD_CACHE_CAPACITY", "HOROVOD_TIMELINE_MARK_CYCLES"), _CYCLES),
    **dict.fromkeys(("HOROVOD_AUTOTUNE", "HOROVOD_AUTOTUNE_LOG", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES",
                     "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
                     "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE"), "there is nothing to tune"),
    **dict.fromkeys(("HOROVOD_HIERARCHICAL_ALLREDUCE", "HOROVOD_HIERARCHICAL_ALLGATHER", "HOROVOD_TORUS_ALLREDUCE",
                     "HOROVOD_BATCH_D2D_MEMCOPIES", "HOROVOD_DISABLE_GROUP_FUSION", "HOROVOD_ENABLE_ASYNC_COMPLETION",
                     "HOROVOD_NUM_NCCL_STREAMS", "HOROVOD_ADASUM_MPI_CHUNK_SIZE"), _TUNED_BY_ITSELF),
    "HOROVOD_ENABLE_XLA_OPS": "jit_compile=True is enough",
    "HOROVOD_THREAD_AFFINITY": "no thread is bound to a core",
    "HOROVOD_MPI_THREADS_DISABLE": "MPI is used by one thread at a time",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "HVKERAS_START_TIMEOUT sets how long ranks wait for each other",
    "HOROVOD_LOG_HIDE_TIME": "log lines carry no time",
}
# Variables that Horovod's launchers set, or that others of its parts read.
OF_LAUNCHERS = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK",
                "HOROVOD_CROSS_SIZE", "HOROVOD_HOSTNAME", "HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS",
                "HOROVOD_GPU_OPERATIONS", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT",
                "HOROVOD_GLOO_IFACE", "HOROVOD_ELASTIC", "HOROVOD_STALL_CHECK_DISABLE", "HOROVOD_DYNAMIC_PROCESS_SETS")


def ignored_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return Horovod's variables that are set but affect only Horovod's engine.

    Args:
        environ: The environment to read; that of this process by default.

    Returns:
        The reason why it is ignored, by variable.
    """
    environ = os.environ if environ is None else environ
    return {name: why for name, why in IGNORED.items() if environ.get(name)}


def misspelt_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return variables that are set, and that Horovod does not have, but one with almost the same name.

    Args:
        environ: The environment to read; that of this process by default.

    Returns:
        The name that was probably meant, by variable.
    """
    known = {*IGNORED, *OF_LAUNCHERS, *(row.horovod for row in TABLE if row.horovod)}
    found = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.9)
             for name in (os.environ if environ is None else environ)
             if name.startswith("HOROVOD_") and name not in known}
    return {name: near[0] for name, near in found.items() if near}


class Settings:
    """Settings of this process, one read-only attribute per row of `TABLE`.

    Example:
        >>> Settings({"HVKERAS_BUCKET_SIZE": "64MB"}).bucket_size
        64000000

    Args:
        environ: The environment to read; that of this process by default.

    Raises:
        UsageError: An `HVKERAS_*` variable is unknown or invalid.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        known = {row.variable for row in TABLE}
        for variable in environ:
            if variable.startswith(PREFIX) and variable not in known:
                near = difflib.get_close_matches(variable, known, n=1)
                hint = f"did you mean {near[0]}" if near else "the valid names are " + ", ".join(sorted(known))
                raise UsageError(explain(f"Variables that begin with {PREFIX} are settings of hvkeras", hint,
                                         variable=variable))
        for row in TABLE:
            self.__dict__[row.name] = _value(row, environ)
        if _switch(environ.get("HOROVOD_STALL_CHECK_DISABLE", "").strip() or "off"):
            for name in ("stall_warning", "stall_shutdown"):
                if not environ.get(PREFIX + name.upper()):
                    self.__dict__[name] = 0.0

    def shared(self) -> dict[str, Any]:
        """Return the settings that all ranks share, by name."""
        return {name: getattr(self, name) for name in SHARED}

    def with_shared(self, values: Mapping[str, Any]) -> Settings:
        """Return these settings with the shared ones of rank 0.

        Args:
            values: Result of `shared` on rank 0.
        """
        result = copy.copy(self)
        result.__dict__.update(values)
        return result

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no setting is called {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("settings are read-only; set the environment variable before init()")


def keras_backend() -> str:
    """Return Keras's variable for its backend, in lower case; "" if it is not set."""
    return os.environ.get("KERAS_BACKEND", "").strip().lower()


def log_level() -> str:
    """Return the setting `log_level` of this process, without reading others, which may still change.

    Raises:
        UsageError: The variable is invalid.
    """
    return str(_value(next(row for row in TABLE if row.name == "log_level"), os.environ))


def _value(row: Setting, environ: Mapping[str, str]) -> Any:
    for variable in filter(None, (row.variable, row.horovod)):
        text = environ.get(variable, "")
        if text.strip():
            try:
                return row.parse(text)
            except UsageError:
                raise
            except ValueError as error:
                raise UsageError(explain(f"{variable} must be readable ({error})", row.help.rstrip("."),
                                         value=text)) from None
    return row.default
