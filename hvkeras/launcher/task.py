"""Program of each `hvkeras.run` process: runs the function, and saves the result in a file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hvkeras.job.session import current_session, is_initialized, this_process
from hvkeras.launcher.calls import loaded_call, pickled_result
from hvkeras.launcher.functions import CALL, result_file


def main(folder: Path) -> None:
    """Run the function, and save its result.

    Args:
        folder: The folder of the call and of the results.

    Raises:
        UsageError: The function's result cannot be pickled.
    """
    data = pickled_result(loaded_call((folder / CALL).read_bytes())())
    if is_initialized() and current_session().is_standby:
        return  # an elastic job ended before this process could join it
    link = this_process().link  # in an elastic job, the rank is that of the last generation
    path = result_file(folder, link.launch.rank if link is not None else int(os.environ["HVKERAS_RUN_RANK"]))
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(data)
    unfinished.replace(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
