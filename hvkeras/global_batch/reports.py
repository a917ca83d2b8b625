"""Reports on functions that the ranks carry out together: what all of them compute, and what they exchange."""

from __future__ import annotations

from hvkeras.diagnostics.findings import THRESHOLDS
from hvkeras.diagnostics.recorder import recording
from hvkeras.host.console import prints_at, say
from hvkeras.job.session import current_session, this_process
from hvkeras.partition.reports import Report

_LITTLE = 1e5  # elements that all ranks may compute whatever share of the work this is
_ROWS = 256  # of which the size of what is exchanged is told
_SHOWN = 8  # places


class Reports:
    """What this process has said about functions."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def add(self, name: str, report: Report, compiles: bool) -> None:
        """Record what became of a function; say what makes it slow.

        Args:
            name: The function's name.
            report: The report.
            compiles: Whether XLA can compile the collectives.
        """
        work, share = max(report.work, 1.0), report.work_by_all / max(report.work, 1.0)
        rows = dict.fromkeys(report.symbols, _ROWS)
        recording().record_function({
            "name": name, "share": share if report.work_by_all > _LITTLE else 0.0,
            "places": [[place, amount / work, why] for place, amount, why in report.costly[:_SHOWN]],
            "divided": sum(report.divided.values()), "by_all": sum(report.by_all.values()),
            "rounds": len(report.rounds), "bytes": report.nbytes(rows)})
        if report.is_compiled and not compiles:
            self.say_once("jit_compile=True: XLA compiles parts of the step only, since it cannot compile the"
                          f" collectives of the backend {current_session().backend.name!r}")
        if share > THRESHOLDS["whole"] and report.work_by_all > _LITTLE:
            places = "; ".join(f"{place} ({why})" for place, _, why in report.costly[:3])
            self.say_once(f"all ranks compute {share:.0%} of the work of {name}, by estimate: {places}; see"
                          " docs/data-parallel.md")

    def say_once(self, text: str) -> None:
        """Print a line on rank 0, the first time."""
        session = current_session()
        if text not in self._said and session.topology.rank == 0 and prints_at(session.settings, "WARNING"):
            say(f"data parallel: {text}")
        self._said.add(text)


def reports() -> Reports:
    """Return the reports of this process."""
    return this_process().part(Reports)
