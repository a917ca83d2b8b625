"""What the control server decides about its ranks: handlers without sockets."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from harness.handlers import Channel
from hvkeras.control import server as server_module
from hvkeras.control.cause import Cause, CauseKind
from hvkeras.control.exchange import packed
from hvkeras.control.handler import TICK
from hvkeras.control.messages import (
    AllScriptsEnded,
    AllValues,
    Arrived,
    ClockAnswer,
    ClockQuestion,
    Deadlines,
    ExitReported,
    Failed,
    Heartbeat,
    JobEnded,
    LeftJob,
    Locate,
    Location,
    MayExit,
    MissingRanks,
    ScriptEnded,
    Standstill,
    Terminate,
    Value,
)
from hvkeras.control.server import ControlHandler

BOOM = Cause(CauseKind.EXCEPTION, 1, "host1", 42, "failed with ValueError: boom", "Traceback ...")
ECHO = Cause(CauseKind.EXCEPTION, 0, "host0", 10, "failed with UnavailableError")


class Job:
    """The handler of a job, with its ranks."""

    def __init__(self, size: int = 2, **deadlines: float) -> None:
        self.ends: list[Cause] = []
        self.warnings: list[str] = []
        self.handler = ControlHandler(size, Deadlines(**deadlines), self.ends.append, self.warnings.append)
        self.channel = Channel(self.handler)
        self.members = [self.channel.join(number, size) for number in range(size)]

    def tell(self, number, *messages):
        self.channel.tell(self.members[number], *messages)

    def sent(self, number, kind):
        """The messages of a class to a rank."""
        return [message for message in self.channel.sent[number] if isinstance(message, kind)]


def test_nobody_can_join_once_all_ranks_are_there():
    channel = Channel(ControlHandler(2, Deadlines()))
    channel.join(0)
    last = channel.join(1, arrives=False)
    assert channel.serving.listens, "the last one may have given up"
    channel.tell(last, Arrived())
    assert not channel.serving.listens


def test_two_processes_of_one_rank_end_the_job_naming_both():
    job = Job()
    job.channel.join(0, host="elsewhere", pid=7)
    assert job.channel.rejected.startswith("two processes claim rank 0: pid 10 on host0 and pid 7 on elsewhere")
    assert [cause.kind for cause in job.ends] == [CauseKind.SETUP]
    assert job.sent(1, JobEnded) == [JobEnded(job.ends[0])]


def test_a_rank_with_another_size_is_refused():
    channel = Channel(ControlHandler(2, Deadlines()))
    channel.join(0, size=3)
    assert "started as one of 3 ranks, the others as one of 2" in channel.rejected


def test_a_failure_reaches_every_rank_with_its_cause():
    job = Job()
    job.tell(1, Failed(BOOM), Failed(ECHO))
    assert job.ends == [BOOM]
    assert [job.sent(rank, JobEnded) for rank in range(2)] == [[JobEnded(BOOM)]] * 2
    job.channel.leave(job.members[1])
    job.channel.join(1)
    assert job.channel.rejected == BOOM.sentence()


def test_an_echo_of_a_failure_waits_for_the_root_cause():
    job = Job()
    job.tell(0, Failed(ECHO, secondary=True))
    job.channel.serving.pass_time(1.0)
    assert not job.ends
    job.tell(1, Failed(BOOM))
    job.channel.serving.pass_time(60.0)
    assert job.ends == [BOOM]


def test_an_echo_without_a_root_cause_blames_the_rank_that_has_left_or_itself():
    for leaves in (False, True):
        job = Job(3)
        if leaves:
            job.tell(2, LeftJob())
        job.tell(0, Failed(ECHO, secondary=True))
        job.channel.serving.pass_time(server_module.SECONDARY_GRACE)
        (cause,) = job.ends
        left = (CauseKind.LEFT, 2, "left the job normally while rank 0 still needed it")
        assert (cause.kind, cause.rank, cause.error) == (left if leaves else (ECHO.kind, 0, ECHO.error))


@pytest.mark.parametrize("answers", ["all", "one", "inside"])
def test_ranks_that_another_has_waited_for_too_long_are_asked_for_their_locations(answers):
    job = Job(3, stall_shutdown=4.0)
    timeout = Cause(CauseKind.TIMEOUT, 0, "host0", 10, "failed with DeadlineExceededError")
    job.tell(0, Failed(timeout, secondary=True))
    job.channel.serving.pass_time(server_module.SECONDARY_GRACE)
    assert [job.sent(rank, Locate) for rank in range(3)] == [[], [Locate()], [Locate()]]
    job.tell(1, Location("train.py:7", "input"))
    assert not job.ends
    if answers != "one":
        job.tell(2, Location("train.py:9" if answers == "all" else "", "train step 1"))
    else:
        job.channel.serving.pass_time(server_module.ANSWER_GRACE)
    (cause,) = job.ends
    waited = "not entered a collective in which rank 0 has waited longer than HVKERAS_STALL_SHUTDOWN allows (4 s): "
    assert cause.kind is CauseKind.STALLED
    assert (cause.rank, cause.error) == ((None, f"ranks have {waited}rank 1 at train.py:7, rank 2 at train.py:9")
                                         if answers == "all" else (1, f"has {waited}it is at train.py:7"))


def test_a_lost_connection_is_a_failure_unless_the_rank_said_goodbye():
    job = Job(3)
    job.tell(1, LeftJob())
    job.channel.leave(job.members[1])
    assert not job.ends
    job.channel.leave(job.members[2])
    assert [(cause.kind, cause.rank, cause.host) for cause in job.ends] == [(CauseKind.LOST, 2, "host2")]


def test_a_rank_may_come_again_that_did_not_know_that_it_was_admitted():
    for comes in (True, False):
        channel = Channel(ControlHandler(2, Deadlines()))
        channel.join(0)
        channel.leave(channel.join(1, arrives=False))
        for number in range(int(server_module.RECONNECT_WITHIN / TICK)):
            assert channel.handler.ranks.cause is None
            if comes and number == 5:
                channel.join(1)
            channel.handler.on_tick(0.0)
        cause = channel.handler.ranks.cause
        assert cause is None if comes else (cause.kind, cause.rank) == (CauseKind.LOST, 1)


def test_messages_of_a_connection_that_was_given_up_do_not_count():
    channel = Channel(ControlHandler(2, Deadlines()))
    first = channel.join(1, arrives=False)
    channel.leave(first)
    channel.join(1)
    channel.tell(first, Failed(BOOM))
    assert channel.handler.ranks.cause is None


def test_a_silent_rank_is_lost_after_the_liveness_deadline():
    job = Job(liveness=5.0)
    now = job.members[0].seen
    job.members[1].seen = now - 3.0
    job.handler.on_tick(now + 1.0)
    assert not job.ends
    job.handler.on_tick(now + 2.5)
    (cause,) = job.ends
    assert (cause.kind, cause.rank) == (CauseKind.SILENT, 1) and "no sign of life for 5 s" in cause.error


@pytest.mark.parametrize("stopped", [True, False])
def test_behind_a_relay_that_has_stopped_no_rank_counts_as_silent(stopped):
    job = Job(liveness=5.0)
    now = job.members[0].seen
    relay = SimpleNamespace(member=SimpleNamespace(seen=now + 0.9), ranks={1}, broadcast=lambda _: None)
    job.handler.ranks.present[1].relay = relay
    job.members[0].seen = now + 5.0
    if not stopped:
        relay.member.seen = now + 4.5
    job.handler.on_tick(now + 5.2)  # the rank's timeout is over, and that of the relay is not
    assert [cause.rank for cause in job.ends] == ([] if stopped else [1])


def test_all_ranks_may_exit_only_when_all_have_spoken_or_the_time_is_over():
    for speaks in (True, False):
        job = Job(exit_grace=5.0)
        job.tell(1, Failed(BOOM), ExitReported())
        job.channel.serving.pass_time(5.9)
        assert not job.sent(1, MayExit)
        if speaks:
            job.tell(0, ExitReported())
        else:
            job.channel.serving.pass_time(0.1)
        assert [len(job.sent(rank, MayExit)) for rank in range(2)] == [1, 1]
        job.channel.serving.pass_time(60.0)
        assert len(job.sent(0, MayExit)) == 1


def test_ranks_that_save_first_are_asked_to_and_those_that_start_are_not():
    cause = Cause(CauseKind.SIGNAL, None, "", None, "the launcher received SIGTERM")
    job = Job()
    job.handler.terminate(cause)
    assert job.sent(0, Terminate) == [Terminate(cause)] and not job.ends
    alone = Channel(ControlHandler(2, Deadlines()))
    alone.join(0)
    alone.handler.terminate(cause)
    assert alone.handler.ranks.cause is cause


def test_the_end_of_the_last_script_is_announced_and_what_outlives_it_is_named():
    job = Job(stall_warning=10.0, stall_shutdown=60.0, liveness=5.0)
    job.tell(0, ScriptEnded(), LeftJob())
    assert not job.sent(1, AllScriptsEnded)
    job.tell(1, ScriptEnded(), LeftJob())
    assert job.sent(0, AllScriptsEnded) and job.sent(1, AllScriptsEnded)
    now = job.members[0].seen
    job.handler.on_tick(now + 5.0)
    assert not job.warnings
    job.handler.on_tick(now + 11.0)
    job.handler.on_tick(now + 12.0)
    assert len(job.warnings) == 2, "of each rank once"
    assert re.search(r"rank 0 on host0 .*has left the job, but its process has not ended, 1\d s after", job.warnings[0])
    job.handler.on_tick(now + 66.0)
    assert job.ends[0].error.endswith("(HVKERAS_STALL_SHUTDOWN sets the limit)")


def test_a_gather_names_whom_it_waits_for_and_gives_every_rank_all_values_in_rank_order():
    job = Job()
    job.tell(1, Value("key", "one"))
    job.handler.on_tick(job.members[0].seen)
    assert job.sent(1, MissingRanks) == [MissingRanks("key", [0, 0])] and not job.sent(0, MissingRanks)
    job.tell(0, Value("key", "zero"))
    assert [job.sent(rank, AllValues) for rank in range(2)] == [[AllValues("key", packed(["zero", "one"]))]] * 2


def test_the_deadlines_of_the_first_rank_replace_those_of_the_server():
    job = Job(liveness=1000.0, stall_warning=1000.0)
    job.tell(0, Deadlines(liveness=50.0, stall_warning=10.0))
    job.tell(1, Heartbeat(standstill=Standstill(20.0, 20.0, "train step 3", "train", True, True)))
    now = job.members[0].seen
    job.handler.on_tick(now)
    assert job.sent(1, Locate) == [Locate("")]
    job.handler.on_tick(now + 51.0)
    assert job.ends[0].kind is CauseKind.SILENT


def test_the_time_of_the_server_comes_with_the_question():
    job = Job()
    job.tell(0, ClockQuestion(7.0))
    (answer,) = job.sent(0, ClockAnswer)
    assert answer.asked == 7.0 and answer.host


def test_a_fault_ends_the_job_under_its_own_name():
    job = Job()
    job.handler.on_fault("at a message (Value) of rank 0", KeyError("absent"))
    (cause,) = job.ends
    assert cause.kind is CauseKind.EXCEPTION and "KeyError: 'absent'" in cause.error and cause.traceback
