"""The command `hvkeras doctor`."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from hvkeras.diagnostics.check_build import print_unpadded
from hvkeras.diagnostics.doctor import hosts, machine, software
from hvkeras.diagnostics.doctor.machine import NOTE, OK, PROBLEM, CheckResult
from hvkeras.host.ssh import Ssh
from hvkeras.launcher.placement import THIS_HOST, place_ranks
from hvkeras.launcher.run_arguments import Parser
from hvkeras.settings import Settings

ALL_HOSTS = "all hosts"
WIDTH = 120  # columns of the table if the output is not a terminal
_COLOURS = {OK: "green", NOTE: "yellow", PROBLEM: "bold red"}
_EPILOG = """The exit code is 1 if there is a problem, and 0 otherwise. Notes concern only some jobs, or their speed.
Example: hvkeras doctor -H node1,node2"""

Reports = dict[str, dict[str, Any]]  # the findings and versions of each host


def doctor(arguments: Sequence[str]) -> int:
    """Check this machine, or several hosts, and print the findings.

    Args:
        arguments: Arguments of `hvkeras doctor`.

    Returns:
        Exit code: 1 if there is a problem, else 0.

    Raises:
        UsageError: The command line is invalid.
    """
    flags = _parser().parse_args(arguments)
    listed = place_ranks(None, flags.hosts, flags.hostfile) if (flags.hosts, flags.hostfile) != (None, None) else []
    others = [host.name for host in listed if not host.local]
    reports: Reports = {}
    if not listed or any(host.local for host in listed):
        reports[THIS_HOST] = _own_report(flags, others)
    elif others:  # this machine only starts the job
        reports[THIS_HOST] = {"findings": [hosts.names(others)], "versions": {}}
    if others:
        timeout = Settings({}).start_timeout if flags.start_timeout is None else flags.start_timeout
        reports |= hosts.check_hosts(others, Ssh(flags.ssh_port, flags.ssh_identity_file, timeout))
    shared = list(hosts.differences({host: report["versions"] for host, report in reports.items()}))
    everything = {host: report["findings"] for host, report in reports.items()}
    if shared:
        everything[ALL_HOSTS] = shared
    if flags.json:
        print(json.dumps(_as_json(reports, shared), indent=2))
    else:
        _print(everything)
    return int(any(row.state == PROBLEM for rows in everything.values() for row in rows))


def _parser() -> Parser:
    made = Parser(prog="hvkeras doctor", epilog=_EPILOG, allow_abbrev=False, description="Check whether training on"
                  " several workers will work on this machine, or on several hosts, and print fixes for problems.")
    made.add_argument("-H", "--hosts", metavar="HOST,...", help="Hosts to check, over ssh.")
    made.add_argument("-hostfile", "--hostfile", metavar="FILE", help="File with one line per host.")
    made.add_argument("-p", "--ssh-port", type=int, metavar="PORT", help="Port of ssh on the other hosts.")
    made.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="Key for ssh.")
    made.add_argument("--start-timeout", type=float, metavar="SECONDS", help="Seconds for hosts to respond over"
                      " ssh.")
    made.add_argument("--json", action="store_true", help="Print JSON instead of a table.")
    # Flags that the first host passes to the others.
    made.add_argument("--call", metavar="ADDRESS", help=argparse.SUPPRESS)
    made.add_argument("--called", metavar="NAME", default="", help=argparse.SUPPRESS)
    made.add_argument("--others", metavar="HOST,...", default="", help=argparse.SUPPRESS)
    return made


def _own_report(flags: argparse.Namespace, others: Sequence[str]) -> dict[str, Any]:
    facts = software.probe_imports()
    rows = [*software.findings(facts, os.environ), *machine.findings(os.environ)]
    if others := [*others, *filter(None, flags.others.split(","))]:
        rows.append(hosts.names(others))
    if flags.call:
        rows.append(hosts.call(flags.call, flags.called, sys.stdin.readline().strip()))
    return {"findings": rows, "versions": software.versions(facts)}


def _as_json(reports: Reports, shared: Sequence[CheckResult]) -> dict[str, Any]:
    """Return the output of `--json`: name, versions and findings of all `hosts`, and common findings (`all_hosts`)."""
    return {
        "hosts": [{"name": socket.gethostname() if host == THIS_HOST else host, "versions": report["versions"],
                   "findings": [row.as_json() for row in report["findings"]]} for host, report in reports.items()],
        "all_hosts": [row.as_json() for row in shared],
    }


def _print(findings: dict[str, list[CheckResult]]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    several = len(findings) > 1
    for title in (*(["host"] if several else []), "", "state", "found", "what to do"):
        table.add_column(title, overflow="fold")
    for host, rows in findings.items():
        for index, row in enumerate(rows):
            first = [host if index == 0 else ""] if several else []
            table.add_row(*first, row.check, f"[{_COLOURS[row.state]}]{row.state}[/]", _plain(row.found),
                          _plain(row.fix))
        table.add_section()
    print_unpadded(console, table)
    counted = [row.state for rows in findings.values() for row in rows]
    problems, notes = counted.count(PROBLEM), counted.count(NOTE)
    names = ", ".join(dict.fromkeys(row.check for rows in findings.values() for row in rows if row.state == PROBLEM))
    console.print(f"\nTraining will work{', see the notes' if notes else ''}." if not problems else
                  f"\n{problems} problem{'s' * (problems > 1)} to solve ({names}): until then, jobs that need"
                  f" {'these' if problems > 1 else 'this'} fail or are slower.")


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
