"""Which tasks of a cluster may be lost: the chief's handler without sockets."""

from __future__ import annotations

import pytest

from harness.handlers import Channel
from hvkeras.control.cause import Cause, CauseKind
from hvkeras.control.launch_environments import parameter_server_launch
from hvkeras.control.messages import ExitReported, Failed, Heartbeat, JobEnded, LeftJob, MayExit
from hvkeras.parameter_server.cluster_membership import ClusterHandler
from hvkeras.settings import Settings

CLUSTER = ('{"cluster": {"chief": ["c:1"], "worker": ["w:1", "w:2"], "ps": ["p:1"]},'
           ' "task": {"type": "chief", "index": 0}}')


class Cluster:
    """A cluster of a chief, two workers and a parameter server, which are members 1, 2 and 3, all connected."""

    def __init__(self, **settings):
        self.ends = []
        launch = parameter_server_launch({"TF_CONFIG": CLUSTER})
        self.handler = ClusterHandler(launch, Settings({f"HVKERAS_{name.upper()}": str(value)
                                                        for name, value in settings.items()}), self.ends.append)
        self.channel = Channel(self.handler)
        self.members = {number: self.channel.join(number, launch.size) for number in range(1, launch.size)}
        self.handler.all_connected = True

    @property
    def now(self):
        return self.members[1].seen


def test_workers_may_be_lost_and_come_back(capsys):
    cluster = Cluster(start_timeout=30)
    worker, server = [next(n for n in (1, 2, 3) if cluster.handler.task_of(n) == task) for task in ("worker 0", "ps 0")]
    cluster.channel.leave(cluster.members[worker])
    assert "training continues with 1 of the workers" in capsys.readouterr().err
    cluster.channel.join(worker, 4)
    assert not cluster.channel.rejected
    assert "has rejoined" in capsys.readouterr().err
    assert not cluster.ends
    cluster.channel.leave(cluster.members[server])
    (cause,) = cluster.ends
    assert (cause.kind, cause.rank) == (CauseKind.LOST, None) and cause.error.startswith("ps 0 on host")


def test_all_workers_may_be_away_for_a_while(capsys):
    cluster = Cluster(start_timeout=30)
    workers = [number for number in (1, 2, 3) if cluster.handler.task_of(number).startswith("worker")]
    cluster.handler.on_tick(cluster.now)
    for number in workers:
        cluster.channel.leave(cluster.members[number])
    assert "training waits for it to rejoin" in capsys.readouterr().err
    for member in cluster.handler.members.values():
        member.seen = cluster.now + 100.0
    cluster.handler.on_tick(cluster.now + 29.0)
    assert not cluster.ends
    cluster.handler.on_tick(cluster.now + 31.0)
    assert "all workers were lost (worker 0 on" in cluster.ends[0].error


def test_a_task_that_gives_no_sign_of_life_ends_the_job():
    cluster = Cluster(liveness_timeout=10)
    cluster.handler.on_tick(cluster.now + 5.0)
    assert all(Heartbeat() in sent for sent in cluster.channel.sent.values())
    cluster.handler.on_tick(cluster.now + 11.0)
    assert (cluster.ends[0].kind, cluster.ends[0].rank) == (CauseKind.SILENT, None)


@pytest.mark.parametrize(("number", "size", "why"), [
    (1, 4, "is connected already; start each process with a different task"),
    (5, 3, "was started in a cluster of 3 tasks, the chief in one of 4")])
def test_a_newcomer_that_does_not_belong_is_rejected_and_the_others_go_on(number, size, why):
    cluster = Cluster()
    cluster.channel.join(number, size)
    assert why in cluster.channel.rejected and not cluster.ends


def test_a_failure_ends_all_tasks_together():
    cluster = Cluster()
    cause = Cause(CauseKind.SIGNAL, None, "", None, "ps 0 received SIGTERM")
    cluster.channel.tell(cluster.members[1], Failed(cause), ExitReported())
    assert [JobEnded(cause) in sent for sent in cluster.channel.sent.values()] == [True] * 3
    cluster.channel.tell(cluster.members[2], LeftJob())
    assert MayExit() not in cluster.channel.sent[1]
    cluster.channel.leave(cluster.members[3])
    assert MayExit() in cluster.channel.sent[1] and cluster.ends == [cause]
