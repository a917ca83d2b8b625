"""Clusters with parameter servers: training, loss of tasks, end of all tasks, and messages."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import h5py
import pytest
import tensorflow as tf

from harness import Job, Outcome, start_job
from hvkeras.control.launch_environments import parameter_server_launch
from hvkeras.errors import UsageError

WORKER = Path(__file__).parent / "workers" / "parameter_server.py"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "parameter_server.py"
ENDLESS = "100000"
QUICK = {"HVKERAS_LIVENESS_TIMEOUT": "5"}


def last_line(text: str) -> str:
    return [line for line in text.splitlines() if line.strip() and not line.startswith("HINT: ")][-1]


def wait_for_epochs(job: Job, more: int) -> int:
    """Wait until the chief has trained `more` epochs, and return the number of epochs."""
    log = job.folder / "logs" / "rank.0" / "stdout"
    done = len(re.findall(r"^epoch ", log.read_text(), re.MULTILINE)) if log.exists() else 0
    first = re.search(r"^epoch (\d+)", log.read_text(), re.MULTILINE) if done else None
    epoch = (int(first[1]) - 1 if first else 0) + done + more
    job.wait_for(0, f"epoch {epoch} ")
    return epoch


@pytest.mark.nightly
def test_the_example_trains_and_the_evaluator_sees_the_last_checkpoint(launch: Callable[..., Outcome]) -> None:
    outcome = launch("tf_config", EXAMPLE, ("--epochs", "5", "--checkpoint-dir", "saved"), np=5,
                     roles=("chief", "worker", "worker", "ps", "evaluator"))
    found = re.findall(r"^test accuracy: (\d\.\d{4})$", outcome.stdout(0), re.MULTILINE)
    assert len(found) == 1 and float(found[0]) >= 0.93
    assert "hvkeras: asynchronous training on 2 workers and 1 parameter server\n" in outcome.stderr(0)
    assert f"hvkeras: evaluator: epoch 5: accuracy {found[0]}, loss " in last_line(outcome.stderr(4))
    with h5py.File(outcome.cwd / "saved" / "epoch-00005.weights.h5") as file:
        assert file["optimizer/vars/0"][()] == 5 * 47  # steps of both workers count, and none is lost
    assert not any(outcome.stdout(rank) for rank in range(1, 5))
    assert sorted(path.name for path in (outcome.cwd / "saved").iterdir()) == [
        f"epoch-0000{epoch}.weights.h5" for epoch in (3, 4, 5)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    """A job whose worker 1 is killed, restarted and terminated, and whose chief is terminated at the end."""
    folder = tmp_path_factory.mktemp("parameter-server")
    with start_job("tf_config", WORKER, (ENDLESS, str(folder)), np=6, folder=folder, expect_failure=True, env=QUICK,
                   deadline=120.0, roles=("chief", "worker", "worker", "ps", "ps", "evaluator")) as job:
        wait_for_epochs(job, 2)
        os.kill(job.pid(2), signal.SIGKILL)
        job.wait_for(0, "training continues with 1 of the workers", stream="stderr")
        wait_for_epochs(job, 3)
        job.start_again(2)
        job.wait_for(0, "has rejoined", stream="stderr")
        wait_for_epochs(job, 3)
        os.kill(job.pid(2), signal.SIGTERM)
        job.wait_for(2, "received SIGTERM", stream="stderr")
        wait_for_epochs(job, 3)
        job.wait_for(5, "evaluator: epoch", stream="stderr")
        os.kill(job.pid(0), signal.SIGTERM)
        outcome = job.wait(deadline=20.0)
    return outcome, folder


def test_a_lost_worker_is_reported_and_may_come_back(trained: tuple[Outcome, Path]) -> None:
    outcome, _ = trained
    told = [line for line in outcome.stderr(0).splitlines() if line.startswith("hvkeras: worker 1")]
    lost = (r"hvkeras: worker 1 on \S+ \(pid \d+\) ended unexpectedly \(killed, crashed, or out of memory\); training"
            r" continues with 1 of the workers")
    for line, words in zip(told, (lost, r"hvkeras: worker 1 on \S+ \(pid \d+\) has rejoined", lost), strict=True):
        assert re.fullmatch(words, line)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", outcome.stdout(0))]
    assert losses[-1] < 0.5 * losses[0]


def test_tasks_end_on_sigterm_and_with_their_chief(trained: tuple[Outcome, Path]) -> None:
    outcome, _ = trained
    assert outcome.exit_codes == (143, 1, -signal.SIGKILL, 1, 1, 1, 143)
    assert re.fullmatch(r"hvkeras: chief 0 on \S+ \(pid \d+\) received SIGTERM; the job ends on all tasks",
                        last_line(outcome.stderr(0)))
    for rank, task in {1: "worker 0", 3: "ps 0", 4: "ps 1", 5: "evaluator 0"}.items():
        assert re.fullmatch(rf"hvkeras: {task} on \S+ ends because chief 0 on \S+ \(pid \d+\) received SIGTERM",
                            last_line(outcome.stderr(rank)))


def test_the_evaluator_writes_for_tensorboard(trained: tuple[Outcome, Path]) -> None:
    outcome, folder = trained
    told = re.findall(r"evaluator: epoch (\d+): loss (\S+)", outcome.stderr(5))
    (path,) = (folder / "logs" / "evaluator").iterdir()
    written = [(event.step, value.tag, float(tf.make_ndarray(value.tensor)))
               for event in tf.compat.v1.train.summary_iterator(str(path)) for value in event.summary.value]
    assert [(step, tag) for step, tag, _ in written] == [(int(epoch), "epoch_loss") for epoch, _ in told]
    assert [f"{value:.4f}" for _, _, value in written] == [loss for _, loss in told]


@pytest.mark.parametrize(("number", "words"), [
    pytest.param(signal.SIGKILL, r"ended unexpectedly \(killed, crashed, or out of memory\)", marks=pytest.mark.slow),
    (signal.SIGSTOP, r"gave no sign of life for 5 s \(stopped, frozen or cut off\)"),
], ids=["killed", "stopped"])
def test_a_lost_server_ends_the_job_which_resumes_at_another_size(
    number: int, words: str, trained: tuple[Outcome, Path], tmp_path: Path
) -> None:
    _, folder = trained
    with start_job("tf_config", WORKER, (ENDLESS, str(folder)), np=3, folder=tmp_path, expect_failure=True, env=QUICK,
                   deadline=90.0, cold=number == signal.SIGKILL, roles=("chief", "worker", "ps")) as job:
        wait_for_epochs_from_checkpoint(job)
        pid = job.pid(2)
        os.kill(pid, number)
        for process in job._processes[:2]:
            process.wait(timeout=30)
        if number == signal.SIGSTOP:
            os.kill(pid, signal.SIGKILL)
        outcome = job.wait(deadline=20.0)
    assert outcome.exit_codes == (1, 1, -signal.SIGKILL)
    assert re.search(rf"ps 0 on \S+ \(pid {pid}\) {words}", last_line(outcome.stderr(0)))
    assert re.fullmatch(rf"hvkeras: worker 0 on \S+ ends because ps 0 on \S+ \(pid {pid}\) {words}",
                        last_line(outcome.stderr(1)))


def wait_for_epochs_from_checkpoint(job: Job) -> None:
    """Wait until the chief has trained an epoch from a checkpoint of another cluster."""
    job.wait_for(0, "training resumes after epoch ", stream="stderr")
    job.wait_for(0, "epoch ")
    log = (job.folder / "logs" / "rank.0")
    after = re.search(r"training resumes after epoch (\d+), from", (log / "stderr").read_text())
    assert after is not None and int(after[1]) > 5
    assert (log / "stdout").read_text().startswith(f"epoch {int(after[1]) + 1} ")


def test_missing_tasks_are_named_on_all_others(tmp_path: Path) -> None:
    with start_job("tf_config", WORKER, (ENDLESS, str(tmp_path)), np=4, folder=tmp_path, expect_failure=True,
                   roles=("chief", "worker", "worker", "ps"), start_order=(0, 1),
                   env={"HVKERAS_START_TIMEOUT": "7"}) as job:
        outcome = job.wait(deadline=60.0)
    assert outcome.exit_codes == (1, 1)
    for rank in (0, 1):
        assert re.search(r"within 7 s, but there is no answer from worker 1 \(localhost:\d+\), ps 0 \(localhost:\d+\)",
                         last_line(outcome.stderr(rank)))


CLUSTER = {"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["p:1"]}


def launch_of(cluster: object, kind: str, index: int = 0) -> object:
    task = {"type": kind, "index": index}
    return parameter_server_launch({"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})})


def test_every_role_has_its_place() -> None:
    for rank, (kind, index) in enumerate([("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0), ("evaluator", 0)]):
        launch = launch_of(CLUSTER, kind, index)
        assert (launch.rank, launch.size, launch.tasks[rank]) == (rank, 4, f"{kind} {index}")
    listed = launch_of(CLUSTER | {"evaluator": ["e:1"]}, "chief")
    assert (listed.size, listed.tasks[-1]) == (4, "evaluator 0")
    assert listed.rendezvous == launch_of(CLUSTER, "ps").rendezvous


@pytest.mark.parametrize(("cluster", "kind", "complaint"), [
    ({"chief": ["c:1"], "worker": ["a:1"]}, "chief", 'must have a "ps"'),
    ({"worker": ["a:1"], "ps": ["p:1"]}, "worker", 'must have a "chief"'),
    ({"chief": ["c:1"], "ps": ["p:1"]}, "ps", 'must have a "worker"'),
    (CLUSTER | {"ps": ["a:1"]}, "ps", "worker 0 and ps 0 share one"),
    (CLUSTER, "boss", "task type"),
])
def test_a_cluster_that_cannot_train_is_refused(cluster: object, kind: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        launch_of(cluster, kind)


def test_no_tf_config_says_what_is_needed() -> None:
    with pytest.raises(UsageError, match="needs TF_CONFIG") as caught:
        parameter_server_launch({})
    assert '"ps": [' in str(caught.value)
