"""A rank of the contract tests: tries the clauses one after the other, and writes what it found."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import tensorflow as tf

import hvkeras as hvd
from hvkeras.backends.contract import capabilities, clauses, failures, usage
from hvkeras.backends.contract.ranks import NotTried, Ranks
from hvkeras.job.state import current_job

PARTS: dict[str, dict[str, Callable[[Ranks], None]]] = {
    "collectives": (clauses.CLAUSES | usage.CLAUSES | capabilities.CLAUSES
                    | {failures.GRAPH: failures.abort_in_a_function}),
    "abort": {failures.EAGER: failures.abort_eagerly},
}


def main() -> None:
    """Runs a part of the contract."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--deadline", type=float, required=True)
    arguments = parser.parse_args()
    hvd.init(arguments.backend)
    tf.get_logger().setLevel("ERROR")  # else it warns of functions that are traced often
    ranks = Ranks(arguments.backend)
    with (arguments.results / f"rank.{hvd.rank()}").open("a") as results:
        for name, clause in PARTS[arguments.part].items():

            def note(error: str, name: str = name) -> None:
                results.write(json.dumps({"clause": name, "error": error}) + "\n")
                results.flush()

            with _ended_within(arguments.deadline, note):
                note(_tried(clause, ranks))
                # Over the control channel, so that all begin the next one together, also if this one was an abort.
                control = current_job().control
                assert control is not None
                control.gather(f"contract {name}", None, arguments.deadline)
    sys.stdout.flush()
    os._exit(0)  # an aborted engine ends with its process


def _tried(clause: Callable[[Ranks], None], ranks: Ranks) -> str:
    ranks.begin(clause.__name__)
    try:
        clause(ranks)
    except NotTried as reason:
        return f"skip: {reason}"
    except Exception as error:  # noqa: BLE001 - it is what the test reports
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno}: {where.line})"
    return ""


@contextlib.contextmanager
def _ended_within(seconds: float, note: Callable[[str], None]) -> Iterator[None]:
    """Ends this process, and so the job, if its body takes longer."""

    def end() -> None:
        faulthandler.dump_traceback(all_threads=True)
        note(f"did not end within {seconds:g} s; the stacks of all threads are in the output of the job")
        os._exit(3)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


if __name__ == "__main__":
    main()
