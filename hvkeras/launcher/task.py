"""The program of each `hvkeras.run` process: it runs the function, and saves the result in a file."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import cloudpickle

from hvkeras.errors import UsageError, explain
from hvkeras.launcher.functions import CALL, result_file


def main(folder: Path) -> None:
    """Runs the function.

    Args:
        folder: The folder that holds the call, and receives the result.

    Raises:
        UsageError: The function's result cannot be pickled.
    """
    function, arguments, named = pickle.loads((folder / CALL).read_bytes())
    result = function(*arguments, **named)
    try:
        data = cloudpickle.dumps(result)
    except Exception as error:  # whatever an object's own pickling raises
        raise UsageError(explain(f"What the function returns must be picklable ({type(error).__name__}: {error})",
                                 "return numbers, arrays, weights or paths", returned=type(result))) from error
    place = result_file(folder, int(os.environ["HVKERAS_RUN_RANK"]))
    unfinished = place.with_suffix(".unfinished")
    unfinished.write_bytes(data)
    unfinished.replace(place)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
