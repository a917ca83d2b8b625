"""Command line of `hvkeras run`: the flags of horovodrun that apply to hvkeras."""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from hvkeras import __version__
from hvkeras.errors import UsageError, explain
from hvkeras.launcher.horovod_flags import add_tuning_flags, flags_of_file
from hvkeras.settings import LOG_LEVELS, window_of_steps

# Flags of horovodrun that are not accepted, with what to do instead.
_NOT_TAKEN = {
    **dict.fromkeys(("--gloo", "--mpi", "--jsrun"), "leave it out"),
    **dict.fromkeys(("--mpi-args", "--binding-args"), "start with mpirun to pass options to MPI"),
}

ELASTIC_RESETS, ELASTIC_TIMEOUT = 3, 600.0
DEFAULT = "hvkeras-report"  # default folder of a report
_REPORT = "--report"
_SEPARATE_FOLDER = f"{_REPORT}=\0"  # a --report whose folder, if any, was a separate argument
_NEAR = 0.7  # similarity from which a flag is suggested: below, --oversubscribe resembles --verbose
# Flags that many scripts have as well: after the command, they cause no warning.
_COMMON = {"--version", "--verbose", "--backend", "--log-level", "--config-file"}
_EPILOG = """Everything after the command is the command's own. Settings are HVKERAS_* variables; ranks inherit the
environment. Example: hvkeras run -np 2 python train.py --epochs 3"""


class _NotTaken(argparse.Action):
    """Action that rejects a flag of horovodrun."""

    def __call__(self, *arguments: Any, **_: Any) -> NoReturn:
        flag = arguments[-1]
        raise UsageError(explain(f"hvkeras run does not take horovodrun's {flag}", _NOT_TAKEN[flag]))


class Parser(argparse.ArgumentParser):
    """Argument parser that raises `UsageError`."""

    def error(self, message: str) -> NoReturn:
        """Raise argparse's error as a `UsageError`."""
        hint = "-np 2" if message.startswith("argument -np/") else f"see {self.prog} --help"
        raise UsageError(explain(f"The command line must be readable ({message})", hint))


def seconds_or_never(text: str) -> float:
    """Parse a duration in seconds; 0 means never."""
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"a number of seconds is 0 (never) or more, not {text}")
    return value


def seconds(text: str) -> float:
    """Parse a positive duration in seconds."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"a number of seconds is positive, not {text}")
    return value


def limit(text: str) -> int:
    """Parse a limit: an integer of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"a limit is 0 or more, not {text}")
    return value


def times(text: str) -> int:
    """Parse a number of times: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"a number of times is 1 or more, not {text}")
    return value


def steps(text: str) -> str:
    """Validate a window of steps, such as `100:120`."""
    try:
        window_of_steps(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, not {text}") from None
    return text


def parser(prog: str = "hvkeras run") -> argparse.ArgumentParser:
    """Return the argument parser."""
    parser = Parser(prog=prog, description="Start a training script on several processes and hosts.", epilog=_EPILOG,
                    allow_abbrev=False, usage=f"{prog} -np N [-H host:slots,...] [options] command ...")
    parser.add_argument("-v", "--version", action="version", version=f"hvkeras {__version__}")
    parser.add_argument("-np", "--num-proc", type=int, dest="np", metavar="N", help="Number of processes; with -H or"
                        " -hostfile, by default the number of slots.")
    parser.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="Hosts, and the number of slots on each.")
    parser.add_argument("-hostfile", "--hostfile", metavar="FILE", help="File with a line `host slots=N` per host.")
    parser.add_argument("-p", "--ssh-port", type=int, metavar="PORT", help="Port of ssh on the other hosts.")
    parser.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="Key for ssh.")
    parser.add_argument("--start-timeout", type=seconds, metavar="SECONDS", help="Seconds within which hosts and ranks"
                        " must start (HVKERAS_START_TIMEOUT).")
    parser.add_argument("--backend", metavar="NAME", help="Collective engine (HVKERAS_BACKEND).")
    parser.add_argument("--as-horovod", action="store_true", help="Make `import horovod` import hvkeras, in the command"
                        " and in all its Python child processes.")
    parser.add_argument("--data-parallel", action="store_true", help="Train a Keras script for one process on all"
                        " ranks, with the result of one process.")
    parser.add_argument("--no-private-folders", action="store_true", help="With --data-parallel: let all ranks write to"
                        " the same working folder.")
    parser.add_argument("--preload", metavar="MODULE,...", help="Import these modules once on each host, and fork the"
                        " ranks from that process, such as tensorflow,keras (HVKERAS_PRELOAD).")
    parser.add_argument("--no-preload", action="store_const", const="", dest="preload", help="Start each rank as a new"
                        " Python process, whatever HVKERAS_PRELOAD says.")
    parser.add_argument("--tf-config", action="store_true", help="Give each rank a TF_CONFIG in which it is a worker,"
                        " for scripts that use tf.distribute directly.")
    parser.add_argument("--network-interfaces", "--network-interface", action="append", metavar="NAME,...",
                        help="Network interfaces for traffic between hosts; may be repeated"
                        " (HVKERAS_NETWORK_INTERFACES).")
    parser.add_argument("--fusion-threshold-mb", type=int, metavar="MIB", help="Size of a bucket of gradients, in"
                        " units of 1024 * 1024 bytes (HVKERAS_BUCKET_SIZE).")
    parser.add_argument("--log-level", choices=LOG_LEVELS, help="What hvkeras, TensorFlow and Horovod print"
                        " (HVKERAS_LOG_LEVEL).")
    parser.add_argument("--config-file", metavar="FILE", help="YAML file with flags, as for horovodrun; flags on the"
                        " command line take precedence.")
    parser.add_argument("--no-stall-check", action="store_true", help="Disable stall warnings, and the termination of"
                        " stalled jobs.")
    parser.add_argument("--stall-check", action="store_false", dest="no_stall_check", help=argparse.SUPPRESS)
    parser.add_argument("--stall-check-warning-time-seconds", type=seconds_or_never, metavar="SECONDS",
                        help="Seconds that a rank waits before a warning names the missing ranks"
                        " (HVKERAS_STALL_WARNING).")
    parser.add_argument("--stall-check-shutdown-time-seconds", type=seconds_or_never, metavar="SECONDS",
                        help="Seconds that a rank waits before the job is terminated (HVKERAS_STALL_SHUTDOWN).")
    parser.add_argument("--reset-limit", type=limit, metavar="N", help="Restart all ranks when one fails, at most N"
                        " times; hvd.elastic resumes from the last commit. In an elastic job: the maximum number of"
                        " membership changes, when ranks fail and when workers join or leave. Default: 0; in elastic"
                        f" jobs {ELASTIC_RESETS} failures, and any number of workers that join or leave.")
    _add_elastic_flags(parser)
    parser.add_argument("--report", metavar="FOLDER", help="Write a report on the run, report.html and report.json,"
                        f" at its end; without a folder, into {DEFAULT} (HVKERAS_REPORT).")
    parser.add_argument("--output-filename", metavar="FOLDER", help="Write each rank's output to FOLDER/rank.N/stdout"
                        " and stderr.")
    parser.add_argument("--timeline-filename", metavar="FILE", help="Write a timeline of rank 0's collectives; with"
                        " {rank} in the name, of each rank's (HVKERAS_TIMELINE).")
    parser.add_argument("--trace-steps", type=steps, metavar="A:B", help="Trace steps A to B-1 on all ranks, counted"
                        " from 0 since training began: 100:120 is 20 steps (HVKERAS_TRACE_STEPS).")
    parser.add_argument("--trace-file", metavar="FILE", help="Where the ranks' traces are merged; trace.json by default"
                        " (HVKERAS_TRACE_FILE).")
    parser.add_argument("-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true",
                        help="Prefix each line of output with the time.")
    parser.add_argument("--verbose", action="store_true", help="Log each step of the launcher.")
    parser.add_argument("-cb", "--check-build", action="store_true", help="Show which launchers and backends work"
                        " here, and why others do not.")
    parser.add_argument("--disable-cache", action="store_true", help=argparse.SUPPRESS)  # nothing is cached here
    add_tuning_flags(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    for flag in _NOT_TAKEN:
        parser.add_argument(flag, action=_NotTaken, nargs="?", help=argparse.SUPPRESS)
    return parser


def _add_elastic_flags(parser: argparse.ArgumentParser) -> None:
    elastic = parser.add_argument_group("elastic jobs, which continue when hosts and ranks change")
    elastic.add_argument("--min-np", "--min-num-proc", type=int, dest="min_np", metavar="N", help="Minimum number of"
                         " processes; -np by default.")
    elastic.add_argument("--max-np", "--max-num-proc", type=int, dest="max_np", metavar="N", help="Maximum number"
                         " of processes; the number of slots by default.")
    elastic.add_argument("--host-discovery-script", metavar="COMMAND", help="Prints the available hosts, one"
                         " per line: `host` or `host:slots`.")
    elastic.add_argument("--slots-per-host", type=int, metavar="N", help="Slots of hosts that the script prints without"
                         " a number (default: 1).")
    elastic.add_argument("--elastic-timeout", type=seconds, metavar="SECONDS", help="Seconds for which a restart waits"
                         f" for enough slots (default: {ELASTIC_TIMEOUT:g}).")
    elastic.add_argument("--blacklist-cooldown-range", type=seconds, nargs=2, metavar=("SHORTEST", "LONGEST"),
                         help="Seconds after which a host may be used again that was set aside because it was lost or"
                         " its ranks kept failing; doubled each time. By default, it is not used again.")
    elastic.add_argument("--failures-per-host", type=times, metavar="N", help="Consecutive failures of its ranks"
                         " after which a host is set aside (default: 2; 1 with --as-horovod, as in Horovod).")


def parse(arguments: Sequence[str], prog: str = "hvkeras run") -> argparse.Namespace:
    """Parse a command line.

    Args:
        arguments: The arguments after `hvkeras run`.
        prog: The name of the command in help and errors.

    Returns:
        The flags, and the ranks' `command`.

    Raises:
        MachineError: A file of flags is given, but PyYAML is not installed.
        UsageError: A flag is unknown, not accepted or malformed, or the command is missing.
    """
    found = flags_and_command(parser(prog), arguments)
    if found.config_file:
        found = flags_and_command(parser(prog), [*flags_of_file(found.config_file), *arguments])
    if not found.check_build:
        require_command(found, prog)
    misplaced = [flag for flag in found.after_command if flag not in _COMMON and (
        flag.startswith("--") or (flag == "-np" and found.np is None))]
    if misplaced and not found.check_build and not _runs_hvkeras(found.command):
        print(f"{prog}: {', '.join(misplaced)} will be passed to the command, since flags of {prog} must come before"
              " the command; put -- before the command if that is intended", file=sys.stderr)
    return found


def _runs_hvkeras(command: Sequence[str]) -> bool:
    """Return whether a command is hvkeras itself, which has flags of the same names: `hvkeras exec --as-horovod`."""
    return os.path.basename(command[0]) == "hvkeras" or list(command[1:3]) == ["-m", "hvkeras"]


def flags_and_command(made: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse flags, and the ranks' `command` after them.

    Args:
        made: The parser, which stores the remaining arguments as `command`.

    Returns:
        The flags, the `command`, and `after_command`: the parser's own flags that come after the command, and are
        therefore passed to it. With `--` before the command, this is intended, and the list is empty.

    Raises:
        UsageError: A flag is unknown or malformed.
    """
    found, unknown = made.parse_known_args(_join_report_folder(arguments))
    found.command = list(_split_report_folder(found.command))  # a --report in the command belongs to the command
    if f"{_REPORT}={getattr(found, 'report', None)}".startswith(_SEPARATE_FOLDER):
        found.report = found.report[1:] or DEFAULT
    known = [option for action in made._actions for option in action.option_strings]
    if unknown:
        given = unknown[0].partition("=")[0]
        near = [flag for flag in known if flag.startswith(given)] or difflib.get_close_matches(
            given, known, n=1, cutoff=_NEAR)
        raise UsageError(explain(f"Flags before the command must be {made.prog}'s",
                                 f"did you mean {near[0]}" if near else f"see {made.prog} --help", flag=unknown[0]))
    found.after_command = []
    if found.command[:1] == ["--"]:
        del found.command[0]
    else:
        flags = (word.partition("=")[0] for word in itertools.takewhile(lambda word: word != "--", found.command))
        found.after_command = [flag for flag in dict.fromkeys(flags) if flag in known and flag not in ("-h", "--help")]
    return found


def _join_report_folder(arguments: Sequence[str]) -> list[str]:
    """Join each --report with the folder after it, if any, into one argument.

    Otherwise argparse would parse the command as the folder of a --report without one.
    """
    joined, rest = [], list(arguments)
    while rest:
        word = rest.pop(0)
        folder = rest.pop(0) if word == _REPORT and _begins_with_folder(rest) else ""
        joined.append(_SEPARATE_FOLDER + folder if word == _REPORT else word)
    return joined


def _begins_with_folder(words: Sequence[str]) -> bool:
    """Return whether a folder follows --report: a word that is no command, before a command or flags."""
    if not words or not words[0] or words[0].startswith("-") or shutil.which(words[0]):
        return False
    return len(words) == 1 or words[1].startswith("-") or shutil.which(words[1]) is not None


def _split_report_folder(words: Sequence[str]) -> Iterator[str]:
    for word in words:
        if word.startswith(_SEPARATE_FOLDER):
            yield _REPORT
            yield from filter(None, [word[len(_SEPARATE_FOLDER):]])
        else:
            yield word


def require_command(found: argparse.Namespace, prog: str) -> None:
    """Raise UsageError if the ranks' command is missing."""
    if not found.command:
        raise UsageError(explain("The command that the ranks run must be given", f"{prog} -np 2 python train.py"))
