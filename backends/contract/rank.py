"""Program of a rank of the contract tests: runs the clauses one after another, and writes their results."""

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

_errors: list[str] = []  # uncaught errors of the engine's threads
_HVKERAS = Path(hvkeras.__file__).parent
_FRAMES = 6  # the innermost frames of a stack to print


def main() -> None:
    """Run a part of the contract."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--deadline", type=float, required=True)
    arguments = parser.parse_args()
    threading.excepthook = _record_thread_error
    hvd.init(arguments.backend)
    tf.get_logger().setLevel("ERROR")  # without warnings about retracing
    ranks = ContractRanks(arguments.backend)
    with (arguments.results / f"rank.{hvd.rank()}").open("a") as results:
        for name, clause in PARTS[arguments.part].items():

            def record(found: ClauseResult, name: str = name) -> None:
                results.write(json.dumps({"clause": name, "verdict": found.verdict.value, "text": found.text}) + "\n")
                results.flush()

            with _timeout(arguments.deadline, record, ranks):
                record(_run(clause, ranks))
                # A barrier over the control channel, which still works after an abort.
                control = current_session().control
                assert control is not None
                control.gather(f"contract {name}", None, arguments.deadline)
    sys.stdout.flush()
    os._exit(0)  # an aborted engine cannot stop


def _run(clause: Callable[[ContractRanks], None], ranks: ContractRanks) -> ClauseResult:
    ranks.begin(clause.__name__)
    try:
        clause(ranks)
    except NotTried as reason:
        return ClauseResult(Verdict.NOT_TRIED, str(reason))
    except Exception as error:  # noqa: BLE001 - the test reports it
        frame = traceback.extract_tb(error.__traceback__)[-1]
        location = f"{frame.filename}:{frame.lineno}: {frame.line}"
        return ClauseResult(Verdict.FAILS, f"{type(error).__name__}: {error} ({location}){ranks.while_doing()}")
    return ClauseResult(Verdict.HOLDS)


@contextlib.contextmanager
def _timeout(seconds: float, record: Callable[[ClauseResult], None], ranks: ContractRanks) -> Iterator[None]:
    """Terminate this process, and therefore the job, if the body takes longer."""

    def end() -> None:
        record(ClauseResult(Verdict.HANGS, f"did not end within {seconds:g} s{ranks.while_doing()}\n"
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


def _record_thread_error(args: threading.ExceptHookArgs) -> None:
    text = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
    _errors.append(f"the thread {args.thread.name if args.thread else '?'} has raised\n{text}")


def _stacks() -> list[str]:
    """Return the innermost frames of each other thread that runs code of the engine or of the contract."""
    found = []
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for identity, frame in sys._current_frames().items():
        frames = traceback.extract_stack(frame)
        if identity != threading.get_ident() and any(_is_engine(each.filename) for each in frames):
            found.append(f"the thread {names.get(identity, identity)} is in\n"
                         + "".join(traceback.format_list(frames[-_FRAMES:])).rstrip())
    return found


def _is_engine(file: str) -> bool:
    """Return whether a file is part of the engine or its contract, not of hvkeras, Python or TensorFlow."""
    path = Path(file)
    libraries = (Path(threading.__file__).parent, Path(tf.__file__).parent)
    return (path.parent.name == "contract" or not path.is_relative_to(_HVKERAS) or "backends" in path.parts) and (
        path.is_file() and not any(path.is_relative_to(folder) for folder in libraries[1:])
        and ("site-packages" in path.parts or not path.is_relative_to(libraries[0])))


if __name__ == "__main__":
    main()
