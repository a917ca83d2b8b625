"""A rank of the contract tests: tries the clauses one after the other, and writes what it found."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import tensorflow as tf

import hvkeras
import hvkeras as hvd
from hvkeras.backends.contract import capabilities, clauses, usage
from hvkeras.backends.contract.job import ClauseResult, Verdict
from hvkeras.backends.contract.ranks import ContractRanks, NotTried
from hvkeras.job.session import current_session

PARTS: dict[str, dict[str, Callable[[ContractRanks], None]]] = {
    "collectives": (clauses.CLAUSES | usage.CLAUSES | capabilities.CLAUSES
                    | {usage.GRAPH: usage.abort_in_a_function}),
    "abort": {usage.EAGER: usage.abort_eagerly},
}

_errors: list[str] = []  # of the engine's threads, whose end nobody else notices
_OURS = Path(hvkeras.__file__).parent
_FRAMES = 6  # of a stack, the innermost


def main() -> None:
    """Runs a part of the contract."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--deadline", type=float, required=True)
    arguments = parser.parse_args()
    threading.excepthook = _note_thread_error
    hvd.init(arguments.backend)
    tf.get_logger().setLevel("ERROR")  # else it warns of functions that are traced often
    ranks = ContractRanks(arguments.backend)
    with (arguments.results / f"rank.{hvd.rank()}").open("a") as results:
        for name, clause in PARTS[arguments.part].items():

            def note(found: ClauseResult, name: str = name) -> None:
                results.write(json.dumps({"clause": name, "verdict": found.verdict.value, "text": found.text}) + "\n")
                results.flush()

            with _ended_within(arguments.deadline, note, ranks):
                note(_tried(clause, ranks))
                # Over the control channel, so that all begin the next one together, also if this one was an abort.
                control = current_session().control
                assert control is not None
                control.gather(f"contract {name}", None, arguments.deadline)
    sys.stdout.flush()
    os._exit(0)  # an aborted engine ends with its process


def _tried(clause: Callable[[ContractRanks], None], ranks: ContractRanks) -> ClauseResult:
    ranks.begin(clause.__name__)
    try:
        clause(ranks)
    except NotTried as reason:
        return ClauseResult(Verdict.NOT_TRIED, str(reason))
    except Exception as error:  # noqa: BLE001 - it is what the test reports
        where = traceback.extract_tb(error.__traceback__)[-1]
        index = f"{where.filename}:{where.lineno}: {where.line}"
        return ClauseResult(Verdict.FAILS, f"{type(error).__name__}: {error} ({index}){ranks.while_doing()}")
    return ClauseResult(Verdict.HOLDS)


@contextlib.contextmanager
def _ended_within(seconds: float, note: Callable[[ClauseResult], None], ranks: ContractRanks) -> Iterator[None]:
    """Ends this process, and so the job, if its body takes longer."""

    def end() -> None:
        note(ClauseResult(Verdict.HANGS, f"did not end within {seconds:g} s{ranks.while_doing()}\n"
                     + "\n".join([*_errors, *_stacks()])))
        os._exit(3)

    timer = threading.Timer(seconds, end)
    timer.name = "hvkeras-deadline"
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _note_thread_error(args: threading.ExceptHookArgs) -> None:
    text = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
    _errors.append(f"the thread {args.thread.name if args.thread else '?'} has ended with\n{text}")


def _stacks() -> list[str]:
    """The innermost frames of each thread that is in somebody's own code, as far as hvkeras and Python are not."""
    found = []
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for identity, frame in sys._current_frames().items():
        frames = traceback.extract_stack(frame)
        if identity != threading.get_ident() and any(_is_own(each.filename) for each in frames):
            found.append(f"the thread {names.get(identity, identity)} is in\n"
                         + "".join(traceback.format_list(frames[-_FRAMES:])).rstrip())
    return found


def _is_own(file: str) -> bool:
    """Whether a file is part of the engine, or of its contract, rather than of hvkeras, Python or TensorFlow."""
    path = Path(file)
    libraries = (Path(threading.__file__).parent, Path(tf.__file__).parent)
    return (path.parent.name == "contract" or not path.is_relative_to(_OURS) or "backends" in path.parts) and (
        path.is_file() and not any(path.is_relative_to(folder) for folder in libraries[1:])
        and ("site-packages" in path.parts or not path.is_relative_to(libraries[0])))


if __name__ == "__main__":
    main()
