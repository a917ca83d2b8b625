"""hvkeras on the real Spark: in the driver's process, on local executors, and on a standalone cluster of two hosts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness import LaunchError, Outcome, hosts, spark, start_job

pytestmark = pytest.mark.skipif(bool(spark.missing()), reason=spark.missing())

WORKERS = Path(__file__).parent / "workers"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SESSION, FAULTS, CLUSTER, INSTALL_TENSORFLOW, ESTIMATOR = (
    WORKERS / f"spark_{name}.py" for name in ("session", "faults", "cluster", "tensorflow", "estimator"))
PYTHON_3_9 = "type('Version', (tuple,), {'major': 3, 'minor': 9})((3, 9, 0, 'final', 0))"
LACKING = """
import sys

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name == "hvkeras":
            raise ModuleNotFoundError("No module named 'hvkeras'")

sys.meta_path.insert(0, Lacking())
"""
JAVA_FRAME = "\tat org.apache"

Driver = Callable[..., Outcome]


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """Runs a driver to its end, once a session for the same arguments; no process of its job may be left."""
    done: dict[tuple[Any, ...], Outcome | LaunchError] = {}
    folder = tmp_path_factory.mktemp("drivers")

    def run(script: Path, *arguments: str, env: dict[str, str] | None = None, python: Sequence[str] = ()) -> Outcome:
        key = (script, *arguments, *sorted((env or {}).items()))
        if key not in done:
            try:
                with start_job("none", script, arguments, np=1, folder=folder, python=python or [spark.python()],
                               env=spark.environment() | (env or {}), deadline=600) as job:
                    done[key] = job.wait()
            except LaunchError as error:
                done[key] = error
        outcome = done[key]
        if isinstance(outcome, LaunchError):
            raise outcome
        assert not outcome.orphans, outcome.orphans
        return outcome

    return run


@pytest.fixture
def session(driver: Driver) -> Outcome:
    """The checks in a session inside of the driver."""
    return driver(SESSION, "local[2]")


def test_results_come_in_rank_order_and_output_reaches_the_driver(session: Outcome):
    found, out, err = session.result("results_come_in_rank_order_and_output_reaches_the_driver", 0)
    together = ["rank 0", "rank 1"]
    assert found == [[rank, 1, "two", "yes", "the driver", together] for rank in (0, 1)]
    assert out == ["[0] hello from 0", "[1] hello from 1"]
    assert err == ["[0] a complaint", "[1] a complaint"]


def test_jobs_of_one_session_reduce_though_workers_are_used_again(session: Outcome):
    found = session.result("jobs_of_one_session_reduce_though_workers_are_used_again", 0)
    assert found == [[[rank, 2, 2, 3.0 * factor] for rank in (0, 1)] for factor in (1, 10)]


@pytest.mark.parametrize(("check", "sentence", "last"), [
    ("a_failed_rank_is_named_with_its_traceback",
     r"rank 1 on \S+ \(pid \d+\) failed$", "ValueError: the data are not there"),
    ("so_is_one_that_fails_before_the_others_meet_it", r"rank 1 on \S+ \(pid \d+\) failed$", "KeyError: 'early'"),
    ("so_is_one_that_exits", r"rank 1 on \S+ \(pid \d+\) exited with code 3", "exited with code 3"),
])
def test_a_failed_rank_is_named(check: str, sentence: str, last: str, session: Outcome):
    kind, text = session.result(check, 0)
    assert kind == "PeerError"
    assert re.search(sentence, text.splitlines()[1]), text
    assert text.splitlines()[-1].endswith(last), text
    assert JAVA_FRAME not in text


@pytest.mark.parametrize(("check", "sentence"), [
    ("a_killed_rank_is_named_and_nothing_is_left", r"rank 1 on \S+ \(pid \d+\) was killed by SIGKILL"),
    ("a_killed_worker_of_spark_is_named_and_nothing_is_left", r"the task of rank 1 on \S+ was lost: "),
    ("a_cancelled_job_leaves_nothing", "the job was cancelled in Spark"),
])
def test_what_ends_a_job_is_named_and_nothing_is_left(check: str, sentence: str, session: Outcome):
    kind, text, gone = session.result(check, 0)
    assert kind == "PeerError"
    assert re.search(sentence, text), text
    assert JAVA_FRAME not in text
    assert gone
    if "killed_rank" in check:
        assert "the last words" in text


def test_a_killed_driver_leaves_nothing(session: Outcome):
    assert session.result("a_killed_driver_leaves_nothing", 0) == [4, True]


def test_tasks_that_spark_starts_again_are_refused(session: Outcome):
    for kind, text in session.result("tasks_that_spark_starts_again_are_refused", 0):
        assert kind == "UsageError"
        assert "A job of hvkeras.spark runs once, and Spark has started its tasks again. Received: attempt=1." in text


def test_the_survivors_of_an_elastic_job_go_on_from_the_last_commit(session: Outcome):
    found = session.result("an_elastic_job_goes_on_from_its_last_commit", 0)
    assert [each[0] for each in found] == [4, 4]
    assert found[0][1] == [0, 2]
    assert [each[2] for each in found] == [True, False]  # the survivor has kept its process


def test_backends_are_compared_by_jobs_on_spark(session: Outcome):
    rows, files = session.result("backends_are_compared_by_jobs_on_spark", 0)
    assert [row[:2] for row in rows] == [["native", ""], ["tfdist", ""]]
    assert rows[1][2] == pytest.approx(0, abs=1e-6)
    assert "report.html" in files


def test_mistakes_are_told_at_once(session: Outcome):
    module, result, too_many = session.result("mistakes_are_told_at_once", 0)
    assert "No module named 'nowhere_to_be_found'" in module[1] and "addPyFile" in module[1]
    assert "What the function returns must be picklable" in result[1]
    assert too_many[0] == "UsageError" and "num_proc=64" in too_many[1] and "local[64]" in too_many[1]


@pytest.fixture
def executors(driver: Driver) -> Outcome:
    """The checks on two executors of this host."""
    return driver(FAULTS, "local-cluster[2,1,1024]")


def test_ranks_on_two_executors_reduce(executors: Outcome):
    assert executors.result("ranks_on_two_executors_reduce", 0) == [[rank, 2, 2, 3.0] for rank in (0, 1)]


def test_fewer_slots_than_ranks_are_waited_for(executors: Outcome):
    kind, text, said, _ = executors.result("fewer_slots_than_ranks_are_waited_for", 0)
    assert kind == "MachineError" and "within 7 s" in text and "num_proc=3, slots=2" in text
    assert "waiting: Spark has 2 of 3 task slots" in said


def test_slots_that_another_job_uses_are_waited_for(executors: Outcome):
    kind, text, ranks = executors.result("slots_that_another_job_uses_are_waited_for", 0)
    assert kind == "MachineError" and "end other jobs" in text
    assert ranks == 2


def test_a_lost_executor_is_named_and_nothing_is_left_or_trained_again(executors: Outcome):
    kind, text, gone, started = executors.result("a_lost_executor_is_named_and_nothing_is_left_or_trained_again", 0)
    assert kind == "PeerError"
    assert re.search(r"rank [01] on \S+ .*(was lost|ended unexpectedly)", text), text
    assert gone and started == 2


def test_an_interrupted_driver_goes_on_without_the_job(executors: Outcome):
    assert executors.result("an_interrupted_driver_goes_on_without_the_job", 0) == [True, 2]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[spark.Cluster]:
    """A master and two workers, each with addresses of four GPUs."""
    if hosts.missing():
        pytest.skip(hosts.missing())
    folder = tmp_path_factory.mktemp("cluster")
    script = folder / "gpus"
    script.write_text('#!/bin/sh\necho \'{"name": "gpu", "addresses": ["0", "1", "2", "3"]}\'\n')
    script.chmod(0o755)
    settings = {"spark.worker.resource.gpu.amount": "4", "spark.worker.resource.gpu.discoveryScript": str(script)}
    with hosts.two_hosts() as two, spark.standalone(two, folder, settings) as made:
        yield made


@pytest.fixture
def on_cluster(driver: Driver, cluster: spark.Cluster) -> Callable[..., Outcome]:
    """Runs checks in a driver on the cluster's first host."""
    first, second = cluster.hosts

    def run(*checks: str, **env: str) -> Outcome:
        return driver(CLUSTER, cluster.master, first.address, second.namespace, *checks,
                      env={"SPARK_LOCAL_IP": first.address, **env}, python=first.command(spark.python()))

    return run


def test_ranks_of_a_host_are_neighbours_and_reduce_between_hosts(on_cluster: Callable[..., Outcome]):
    name = "ranks_of_a_host_are_neighbours_and_reduce_between_hosts"
    found, out = on_cluster(name, "gpus_of_spark_are_spread_over_the_tasks").result(name, 0)
    first = found[0][1]
    second = next(other for other in ("host0", "host1") if other != first)
    indices = [(0, first, 0, 2, 0), (1, first, 1, 2, 0), (2, second, 0, 2, 1), (3, second, 1, 2, 1)]
    assert [tuple(each[:5]) for each in found] == indices
    assert sorted(each[5] for each in found) == ["0,1", "0,1", "2,3", "2,3"]
    assert [each[6:] for each in found] == [[10.0, "native"]] * 4
    assert out == [f"[{rank}] the sum is 10.0" for rank in range(4)]


def test_gpus_of_spark_are_spread_over_the_tasks(on_cluster: Callable[..., Outcome]):
    name = "gpus_of_spark_are_spread_over_the_tasks"
    tasks, seen, hidden, workers = on_cluster("ranks_of_a_host_are_neighbours_and_reduce_between_hosts", name).result(
        name, 0)
    assert tasks == 3
    assert [len(devices.split(",")) for devices in seen] == [2, 2, 1]
    assert hidden == ["", ""]
    assert workers == [f"{hosts.NETWORK}.1", f"{hosts.NETWORK}.2"]


@pytest.mark.parametrize(("change", "sentence"), [
    ("import hvkeras\nhvkeras.__version__ = '9.9'\n",
     r"the same hvkeras as the driver, 0\.\d+\.\d+.*host='host1-.*hvkeras='9\.9'"),
    (f"import sys\nsys.version_info = {PYTHON_3_9}\n",
     rf"(?s)task of rank \d on {hosts.NETWORK}\.2 was lost: .*PYTHON_VERSION_MISMATCH.*3\.9"),
    (LACKING, (r"hvkeras 0\.\d+\.\d+ must be installed on every host of Spark, as in the driver"
               r" \(No module named 'hvkeras'\)\. Received: host='host1")),
], ids=["hvkeras", "python", "without hvkeras"])
def test_other_versions_on_a_host_are_named(change: str, sentence: str, on_cluster: Callable[..., Outcome],
                                            tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(change)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase $(hostname) in host1*) export PYTHONPATH={tmp_path}:$PYTHONPATH;; esac\n'
                      f'exec {spark.python()} "$@"\n')
    python.chmod(0o755)
    name = "other_versions_on_a_host_are_named"
    kind, text = on_cluster(name, PYSPARK_PYTHON=str(python)).result(name, 0)
    assert kind == "PeerError"
    assert re.search(sentence, text), text


def test_a_host_that_is_cut_off_is_named(on_cluster: Callable[..., Outcome]):
    name = "a_host_that_is_cut_off_is_named"
    kind, text, _ = on_cluster(name).result(name, 0)
    assert kind == "PeerError"
    assert re.search(r"rank \d on \S+ .*gave no sign of life for 4 s", text), text


@pytest.fixture
def tensorflow(driver: Driver) -> Outcome:
    """The checks of `MirroredStrategyRunner`."""
    return driver(INSTALL_TENSORFLOW, "local[2]")


def test_fit_trains_in_the_scope_of_a_strategy_as_one_process_would(tensorflow: Outcome):
    tasks, *trained = tensorflow.result("fit_trains_in_the_scope_of_a_strategy", 0)
    alone, devices = tensorflow.result("local_mode_runs_in_the_driver", 0)
    assert (tasks, devices) == (2, "7")
    assert (alone["strategy"], alone["replicas"], alone["devices"]) == ("MirroredStrategy", 1, "")
    for found in trained:
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-4)
        assert found["strategy"] == "CollectiveAllReduceStrategy" and found["replicas"] == found["workers"] == 2
        assert found["task"] == {"type": "worker", "index": 0} and found["devices"] == ""


def test_the_function_may_make_its_own_strategy(tensorflow: Outcome):
    found, together, partition = tensorflow.result("the_function_may_make_its_own_strategy", 0)
    assert (found["replicas"], together, partition) == (2, ["0", "1"], 0)


def test_failures_and_mistakes_of_a_runner_are_told(tensorflow: Outcome):
    kind, text = tensorflow.result("a_failure_is_named", 0)
    assert kind == "PeerError" and re.search(r"(?s)rank 1 on \S+ .* failed\n.*LookupError: no such thing$", text), text
    slots, gpus, encrypted, master = tensorflow.result("mistakes_are_told", 0)
    assert "TensorFlow's connections between tasks are not encrypted, but Spark's are" in encrypted
    assert "num_slots=0" in slots and "spark.task.resource.gpu.amount" in gpus and "use_gpu=False" in gpus
    assert master == "local[2]"  # of the configuration that the runner's `sc` knows


@pytest.fixture
def estimator(driver: Driver, shared_folder: Path) -> Outcome:
    """The checks of estimators."""
    return driver(ESTIMATOR, "local[2]", str(shared_folder))


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for stores."""
    return tmp_path_factory.mktemp("shared")


def test_a_dataframe_becomes_a_model_that_predicts(estimator: Outcome):
    history, column, worst, left, run, optimizer = estimator.result("a_dataframe_becomes_a_model_that_predicts", 0)
    assert sorted(history) == ["loss", "mae", "val_loss", "val_mae"] and len(history["loss"]) == 8
    assert history["val_loss"][-1] < 1e-4 and worst < 0.05
    assert column == ["total__output", "double"]
    assert left == ["runs"]
    assert run == ["checkpoint.keras", "logs"] and optimizer == "SGD"


def test_uneven_rows_are_all_trained_on(estimator: Outcome):
    steps, losses = estimator.result("several_columns_make_up_an_input_and_uneven_rows_are_all_trained_on", 0)
    assert steps == [7, 7]  # 101 rows in batches of 16
    assert losses[1] < losses[0]


def test_a_column_may_mark_validation_and_weigh_samples(estimator: Outcome):
    history = estimator.result("a_column_may_mark_validation_and_weigh_samples", 0)
    assert history["loss"] == [0.0] and history["val_loss"][0] > 1


def test_classes_of_the_driver_and_probabilities_come_along(estimator: Outcome):
    right, accuracy = estimator.result("classes_of_the_driver_and_probabilities_come_along", 0)
    assert min(right, accuracy) > 0.9


def test_all_can_be_saved_and_loaded_also_in_a_pipeline(estimator: Outcome):
    assert estimator.result("all_can_be_saved_and_loaded_also_in_a_pipeline", 0) == [True, "saved", 203]


def test_a_run_goes_on_from_its_checkpoint(estimator: Outcome):
    first, second = estimator.result("a_run_goes_on_from_its_checkpoint_and_data_may_be_there_already", 0)
    assert len(first) == 2 and len(second) == 1 and second[0] < first[1]


def test_two_outputs_train_on_two_labels(estimator: Outcome):
    names, kind, values = estimator.result("two_outputs_train_on_two_labels", 0)
    assert "loss" in names and (kind, values) == ("float", 2)


def test_what_is_ignored_is_said_once(estimator: Outcome):
    assert estimator.result("a_backend_a_transformation_and_what_is_ignored", 0) < 0.05
    assert estimator.stderr(0).count("KerasEstimator ignores reader_pool_type") == 1


def test_mistakes_of_an_estimator_are_told(estimator: Outcome):
    found = estimator.result("mistakes_are_told", 0)
    words = ["the columns are a, b, c", "parameter store", "parameter loss", "fraction of the rows between 0 and 1",
             r"as many values as the model expects\. Received: column='pair', values=2", "must not contain nulls"]
    assert len(found) == len(words)
    for (_, text), word in zip(found, words, strict=True):
        assert re.search(word, text), text


def test_scripts_for_horovod_run_unchanged(driver: Driver):
    outcome = driver(WORKERS / "spark_horovod.py", "local[2]", python=[
        spark.python(), str(Path(spark.python()).with_name("hvkeras")), "exec", "--as-horovod"])
    assert outcome.result("functions_import_horovod", 0) == [
        [rank, 2.0, "hvkeras.tensorflow.keras"] for rank in (0, 1)]
    assert all(module.startswith("hvkeras.spark.") for module in outcome.result("its_names_are_here", 0))


@pytest.mark.parametrize(("name", "line"), [
    ("run", r"test accuracy: 0\.\d{4}"), ("estimator", r"test accuracy: 0\.\d{4}"),
    ("tensorflow", r"training accuracy on 2 tasks: 0\.\d{4}"),
])
def test_examples_train(name: str, line: str, driver: Driver):
    outcome = driver(EXAMPLES / f"spark_{name}.py", "--epochs", "2")
    assert re.search(line, outcome.stdout(0)), outcome.report()
