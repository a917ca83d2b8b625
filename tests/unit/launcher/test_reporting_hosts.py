"""Hosts that report by themselves: a handler without sockets, and an agent's lines in the launcher's event loop."""

from __future__ import annotations

import asyncio
import sys
import threading
import time

import pytest

from harness.handlers import Channel
from hvkeras.control.messages import AgentEnded, AgentLine, EndAgent, Heartbeat, HostLeaving, Machine, StartAgent
from hvkeras.errors import MachineError
from hvkeras.host.network import host_identity
from hvkeras.launcher.host_agents import HostAgent
from hvkeras.launcher.host_reporter import HostOverrides
from hvkeras.launcher.host_reporter import report as report_to
from hvkeras.launcher.placement import HostRanks
from hvkeras.launcher.reporting_hosts import HostsHandler, ReportedTransport, ReportingHosts

SECRET = "s" * 32


@pytest.fixture
def reported():
    """The hosts that have reported, without a connection: what is called is called at once."""
    hosts = ReportingHosts(SECRET, "127.0.0.1")
    hosts._server.call = lambda function, *arguments: function(*arguments)
    channel = Channel(hosts._handler)
    yield hosts, channel
    hosts.stop()


def report(channel, number, name, slots=2):
    member = channel.join(number, slots, name)
    if not channel.rejected:
        channel.tell(member, Machine(f"machine of {name}"))
    return member


def test_hosts_have_slots_once_they_have_said_what_they_are_until_they_leave(reported):
    hosts, channel = reported
    left = []
    hosts.notify_leaving(left.append)
    report(channel, 3, "b", slots=4)
    first = report(channel, 1, "a")
    channel.join(2, 8, "silent")
    assert list(hosts.slots().items()) == [("a", 2), ("b", 4)]
    assert hosts.machines() == {"a": "machine of a", "b": "machine of b"}
    channel.tell(first, HostLeaving())
    assert (hosts.slots(), left) == ({"b": 4}, ["a"])
    channel.leave(first)
    assert "a" not in hosts.machines()


def test_a_host_of_the_same_name_or_number_is_rejected_while_the_first_is_there(reported):
    hosts, channel = reported
    first = report(channel, 1, "a")
    for number, name in ((1, "b"), (2, "a")):
        report(channel, number, name)
        assert channel.rejected == f"host {name} is already connected"
    channel.leave(first)
    report(channel, 2, "a")
    assert not channel.rejected and hosts.slots() == {"a": 2}


def test_a_silent_host_is_given_up():
    channel = Channel(HostsHandler(alive=5.0))
    silent, other = report(channel, 1, "a"), report(channel, 2, "b")
    silent.seen = time.monotonic() - 6.0
    channel.handler.on_tick(other.seen + 1.0)
    assert list(channel.handler.members) == [2]
    assert [host.member for host in channel.handler.present()] == [other]


def test_an_agent_speaks_through_the_connection_of_its_host(reported):
    hosts, channel = reported
    member = report(channel, 1, "pod-1")
    events = []

    async def run():
        host = HostRanks("pod-1", (0, 1), local=False)
        agent = HostAgent(host, ReportedTransport(host, hosts), lambda agent, event: events.append(event))
        connecting = asyncio.ensure_future(agent.connect())
        await asyncio.sleep(0)
        assert channel.sent[1] == [StartAgent()]
        with pytest.raises(MachineError, match="A host must be connected when ranks start on it"):
            hosts.open("pod-1")
        channel.tell(member, Heartbeat(), AgentLine("a greeting"),
                     AgentLine('{"type": "hello", "pid": 7, "host": "inside"}'))
        await connecting
        assert agent.host_name == "pod-1"
        running = asyncio.ensure_future(agent.run({"folder": "x", "environment": {
            "HVKERAS_SECRET": SECRET, "HVKERAS_LOG_LEVEL": "INFO", "PATH": "/bin"}}))
        channel.tell(member, AgentLine('{"type": "started", "worker": 0, "pid": 8}'), AgentEnded())
        await running
        await agent.ended(5.0)
        agent.release()
        assert agent.pids == {0: 8} and not agent.is_stopped(1.0)

    asyncio.run(run())
    assert [event["type"] for event in events] == ["started"]
    assert channel.sent[1][1:] == [AgentLine('{"folder": "x", "environment": {"HVKERAS_LOG_LEVEL": "INFO"}}'),
                                   EndAgent()]


def test_an_agent_whose_host_is_lost_has_not_started(reported):
    hosts, channel = reported
    member = report(channel, 1, "pod-1")

    async def run():
        host = HostRanks("pod-1", (0,), local=False)
        agent = HostAgent(host, ReportedTransport(host, hosts), lambda agent, event: None)
        connecting = asyncio.ensure_future(agent.connect())
        await asyncio.sleep(0)
        channel.leave(member)
        with pytest.raises(MachineError, match="A connected host must start an agent"):
            await connecting

    asyncio.run(run())


def test_a_host_runs_what_it_is_sent_and_ends_with_the_jobs_code(tmp_path):
    hosts = ReportingHosts(SECRET, "127.0.0.1")
    hosts.start()
    codes, events = [], []
    program = "import os; print(os.environ['MINE'], os.environ['HVKERAS_SECRET'])"
    here = HostOverrides([sys.executable, "-S", "-c", program], {"MINE": "mine"})
    reporting = threading.Thread(target=lambda: codes.append(
        report_to(hosts.address, SECRET, 4, "pod-4", 1, 30.0, here=here)))
    reporting.start()

    async def run():
        while not hosts.slots():
            await asyncio.sleep(0.01)
        host = HostRanks("pod-4", (0,), local=False)
        agent = HostAgent(host, ReportedTransport(host, hosts), lambda agent, event: events.append(event))
        await agent.connect()
        running = asyncio.ensure_future(agent.run({"folder": str(tmp_path), "environment": {}, "workers": [
            {"worker": 0, "command": ["absent"], "environment": {}, "terminal": None}]}))
        while not any(event["type"] == "exit" for event in events):
            await asyncio.sleep(0.01)
        agent.release()
        await asyncio.wait_for(running, 30.0)

    asyncio.run(asyncio.wait_for(run(), 60.0))
    assert hosts.machines() == {"pod-4": host_identity()}
    hosts.finish(7)
    reporting.join(30.0)
    assert codes == [7]
    assert [event["code"] for event in events if event["type"] == "exit"] == [0]
    output = b"".join(event["data"] for event in events if event["type"] == "output")
    assert output.decode().split() == ["mine", SECRET]
