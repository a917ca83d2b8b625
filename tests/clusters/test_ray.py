"""Real Ray with two nodes, by its own cluster utility: executors, placement, Ray Tune, and what fails."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from harness.launchers import BIN, TESTS, clean_environment

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

from hvkeras.errors import MachineError, PeerError, UsageError  # noqa: E402
from hvkeras.ray import ElasticRayExecutor, RayExecutor, compare, ray_logger  # noqa: E402
from hvkeras.ray.placement import check_versions  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CPUS = 3  # of each node
pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Two nodes; this process is the driver."""
    import tensorflow  # noqa: F401 - as errors of ranks bring it into this process
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS))  # workers import this module for its functions
        patch.setenv("CRC32C_SW_MODE", "auto")  # as an import of Ray Tune does
        patch.setenv("RAY_DEDUP_LOGS", "0")
        patch.setenv("HVKERAS_BACKEND", "tfdist")
        folder = tmp_path_factory.mktemp("driver")
        (folder / "tests").symlink_to(TESTS)
        patch.chdir(folder)  # workers import from the driver's folder first, and the checkout's hvkeras has no engines
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": CPUS, "include_dashboard": False})
        cluster.add_node(num_cpus=CPUS)
        try:
            ray.init(address=cluster.address, log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture
def executor(nodes):
    """Makes executors, and ends them."""
    with contextlib.ExitStack() as stack:

        def make(*arguments, settings=None, **named):
            made = RayExecutor(settings or RayExecutor.create_settings(timeout_s=60), *arguments, **named)
            stack.callback(made.shutdown)
            return made

        yield make


def meet(extra=0.0):
    import hvkeras as hvd

    hvd.init()
    import tensorflow as tf

    from hvkeras.job.session import current_session

    total = float(hvd.allreduce(tf.constant(float(hvd.rank() + 1)), op=hvd.Sum))
    return {"rank": hvd.rank(), "local": [hvd.local_rank(), hvd.local_size()], "sum": total + extra,
            "launcher": current_session().launch.launcher, "pid": os.getpid(), "node": os.environ["RAY_NODE_ID"]
            if "RAY_NODE_ID" in os.environ else ray.get_runtime_context().get_node_id()}


class Counter:
    """What `start` creates in each worker."""

    def __init__(self, first, step=1):
        self.value, self.step = first, step

    def count(self):
        self.value += self.step
        return self.value


def test_run_returns_the_results_in_the_order_of_the_ranks_and_workers_stay(executor):
    started = executor(num_workers=2)
    started.start(extra_env_vars={"HVKERAS_LOG_LEVEL": "INFO"})
    first = started.run(meet)
    second = started.run(meet, args=[1.0])
    assert [fact["rank"] for fact in first] == [0, 1]
    assert [fact["sum"] for fact in first + second] == [3.0, 3.0, 4.0, 4.0]
    assert [fact["pid"] for fact in first] == [fact["pid"] for fact in second]
    assert {fact["launcher"] for fact in first} == {"Ray"}
    third = ray.get(started.run_remote(meet, kwargs={"extra": 2.0}))
    assert [fact["sum"] for fact in third] == [5.0, 5.0]


def test_execute_uses_the_object_that_start_creates(executor):
    started = executor(num_workers=2)
    started.start(executable_cls=Counter, executable_args=[10], executable_kwargs={"step": 5})
    assert started.execute(lambda counter: counter.count()) == [15, 15]
    assert started.execute_single(lambda counter: counter.count()) == 20
    assert started.execute(lambda counter: counter.value) == [20, 15]
    with pytest.raises(UsageError, match="shut down before it starts again"):
        started.start()


@pytest.mark.parametrize(("shape", "count"), [
    ({"num_workers": 2}, 1), ({"num_hosts": 2, "num_workers_per_host": 1}, 2)])
def test_workers_are_packed_or_spread(executor, shape, count):
    started = executor(**shape)
    started.start()
    found = started.run(lambda: ray.get_runtime_context().get_node_id())
    assert len(set(found)) == count
    started.shutdown()
    assert not [group for group in ray.util.placement_group_table().values() if group["state"] == "CREATED"]


def test_callbacks_get_what_rank_0_logs(executor):
    started = executor(num_workers=2)
    started.start()
    entries = []

    def log():
        import hvkeras as hvd

        hvd.init()
        for epoch in range(3):
            ray_logger.log({"rank": hvd.rank(), "epoch": epoch})

    started.run(log, callbacks=[entries.append])
    assert entries == [{"rank": 0, "epoch": epoch} for epoch in range(3)]


def fail_on_rank_1(how):
    import hvkeras as hvd

    hvd.init()
    import tensorflow as tf

    if hvd.rank() == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the sky is falling")
    hvd.allreduce(tf.ones([3]))


@pytest.mark.parametrize(("how", "cause"), [("raise", "failed with ValueError: the sky is falling"),
                                            ("kill", "ended unexpectedly")])
def test_the_rank_that_failed_is_named_and_the_others_end(executor, how, cause):
    started = executor(num_workers=2)
    started.start()
    pids = [fact["pid"] for fact in started.run(meet)]
    with pytest.raises(PeerError, match=rf"must succeed on every rank, but rank 1 on \S+ \(pid {pids[1]}\) {cause}"):
        started.run(fail_on_rank_1, args=[how])
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    with pytest.raises(UsageError, match=r"start\(\) again"):
        started.run(meet)
    started.start()
    assert [fact["sum"] for fact in started.run(meet)] == [3.0, 3.0]


def test_a_failure_before_init_ends_those_who_wait_there(executor):
    def fail():
        if os.environ["HOROVOD_RANK"] == "1":
            raise ValueError("no data")
        import hvkeras as hvd

        hvd.init()

    started = executor(num_workers=2)
    started.start()
    with pytest.raises(PeerError, match=r"rank 1 on .* failed with ValueError: no data"):
        started.run(fail)


def test_a_cluster_without_room_is_waited_for_and_named(executor, capfd):
    full = executor(num_workers=5, cpus_per_worker=2, settings=RayExecutor.create_settings())
    full.settings.placement_group_timeout_s = 4
    with pytest.raises(MachineError, match=r"must have resources for 5 workers with 2 CPUs each within 4 s.*2 nodes"):
        full.start()
    assert "waiting for resources in the Ray cluster for 5 workers with 2 CPUs each" in capfd.readouterr().err


def test_versions_that_differ_between_nodes_are_named():
    same = {"host": "a", "address": "10.0.0.1", "versions": {"Python": "3.11.7", "hvkeras": "0.1.0"}}
    check_versions([same, same])
    with pytest.raises(MachineError, match=r"same versions.*a \(10\.0\.0\.1\).*b \(10\.0\.0\.2\).*3\.10\.1"):
        check_versions([same, {"host": "b", "address": "10.0.0.2",
                               "versions": {"Python": "3.10.1", "hvkeras": "0.1.0"}}])


@pytest.mark.parametrize("arguments", [{}, {"num_workers": 2, "num_hosts": 1}, {"num_workers": 0},
                                       {"num_workers": 2, "gpus_per_worker": 1}])
def test_arguments_that_contradict_each_other_are_refused(arguments):
    with pytest.raises(UsageError, match="HINT"):
        RayExecutor(None, **arguments)


def test_executors_work_inside_a_trial_of_ray_tune(nodes, tmp_path):
    tune = pytest.importorskip("ray.tune")

    def trial(config):
        inner = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2)
        inner.start()

        def train(rate):
            import hvkeras as hvd

            hvd.init()
            found = meet()
            ray_logger.log({"loss": rate * found["sum"], "size": hvd.size()})

        inner.run(train, args=[config["rate"]], callbacks=[tune.report])
        inner.shutdown()

    needs = tune.PlacementGroupFactory([{"CPU": 0.5}, {"CPU": 1}, {"CPU": 1}])
    tuner = tune.Tuner(tune.with_resources(trial, needs), param_space={"rate": tune.grid_search([2.0])},
                       tune_config=tune.TuneConfig(max_concurrent_trials=1),
                       run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0))
    found = tuner.fit()
    assert not found.errors, found.errors
    assert [(result.metrics["loss"], result.metrics["size"]) for result in found] == [(6.0, 2)]


def train_a_little():
    import keras
    import numpy as np

    import hvkeras as hvd

    hvd.init()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    x = np.ones([32, 3])
    model.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    print("trained")


def test_backends_are_compared_by_jobs_on_ray(nodes, tmp_path):
    settings = RayExecutor.create_settings(timeout_s=60)
    result = compare(train_a_little, np=2, backends=["native", "tfdist"], baseline=False, out=tmp_path,
                     settings=settings)
    assert [(row["backend"], row["failure"]) for row in result.rows] == [("native", ""), ("tfdist", "")]
    assert result.rows[1]["weight_difference"] == pytest.approx(0, abs=1e-6)
    assert [path.read_text() for path in sorted(tmp_path.glob("*/rank.*/stdout"))] == ["trained\n"] * 4
    failed = compare(fail_on_rank_1, args=["raise"], np=2, backends="tfdist", baseline=False, settings=settings)
    assert "rank 1 on" in failed.rows[0]["failure"] and "the sky is falling" in failed.rows[0]["failure"]


def elastic_training(folder):
    """Steps until a rank was killed, another node has come, and it has gone again."""
    import hvkeras as hvd

    hvd.init()
    import tensorflow as tf

    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0, sizes=[], pids=[])

    @hvd.elastic.run
    def train(state):
        while not (3 in state.sizes and hvd.size() == 2):
            if hvd.size() == 1 and not os.path.exists(f"{folder}/killed"):  # the other rank is late
                state.check_host_updates()
                time.sleep(0.1)
                continue
            hvd.allreduce(tf.ones([2]), name="step")
            state.step += 1
            state.sizes = [*state.sizes, hvd.size()]
            state.pids = hvd.allgather_object(os.getpid())
            ray_logger.log({"step": state.step, "sizes": state.sizes})
            state.commit()
            time.sleep(0.1)
            if state.step == 3 and hvd.rank() == 1 and not os.path.exists(f"{folder}/killed"):
                with open(f"{folder}/killed", "w") as file:
                    file.write(" ".join(map(str, state.pids)))
                os.kill(os.getpid(), signal.SIGKILL)
        return hvd.rank(), hvd.size(), os.getpid()

    return train(state)


def test_survivors_of_elastic_executors_go_on_as_nodes_come_and_go(nodes, tmp_path, capfd):
    settings = ElasticRayExecutor.create_settings(min_num_proc=1, max_num_proc=3, timeout_s=60)
    elastic = ElasticRayExecutor(settings, cpus_per_slot=CPUS, env_vars={"HVKERAS_BACKEND": "native"})
    elastic.start()
    added, removed = [], []

    def act(entry):
        sizes = entry["sizes"]
        if 1 in sizes and sizes[-1] == 2 and not added:
            added.append(nodes.add_node(num_cpus=CPUS))
        if 3 in sizes and not removed:
            removed.append(nodes.remove_node(added[0]))

    found = elastic.run(lambda: elastic_training(str(tmp_path)), callbacks=[act])
    assert [(rank, size) for rank, size, _ in found] == [(0, 2), (1, 2)]
    assert removed, "no node was added"
    first = [int(pid) for pid in (tmp_path / "killed").read_text().split()]
    assert first[0] in [pid for _, _, pid in found]  # its process has gone through all of it
    said = capfd.readouterr().err
    assert re.search(r"resumes with 1 rank from commit \d+, \d\.\d s after rank 1 on ", said), said
    assert re.search(r"resumes with 3 ranks from commit \d+, \d\.\d s after new hosts were found", said), said
    assert not list(Path(tempfile.gettempdir()).glob("hvkeras-ray-*"))
    while os.waitpid(-1, os.WNOHANG)[0]:  # what Ray leaves behind of the node
        pass


def test_an_exception_that_comes_twice_ends_an_elastic_executor(nodes):
    settings = ElasticRayExecutor.create_settings(min_num_proc=2, max_num_proc=2, timeout_s=60)
    with pytest.raises(PeerError, match="the sky is falling"):
        ElasticRayExecutor(settings, env_vars={"HVKERAS_BACKEND": "native"}).run(lambda: fail_on_rank_1("raise"))


def test_an_elastic_executor_that_is_short_of_places_says_so(nodes):
    settings = ElasticRayExecutor.create_settings(min_num_proc=7, elastic_timeout=1)
    with pytest.raises(MachineError, match="must have slots for 7 workers within 1 s"):
        ElasticRayExecutor(settings).run(meet)


def test_the_example_trains_in_a_cluster_of_its_own(tmp_path):
    with tempfile.TemporaryDirectory(prefix="ray-") as short:  # for the paths of Ray's sockets
        environment = clean_environment(tmp_path) | {"RAY_TMPDIR": short, "PYTHONPATH": str(EXAMPLES)}
        done = subprocess.run([sys.executable, str(EXAMPLES / "ray_train.py"), "--epochs", "1"], env=environment,
                              cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(re.findall(r"test accuracy: (\S+) on 2 ranks", done.stdout)[0]) > 0.5
    assert "epoch 1: loss" in done.stdout


def test_horovods_scripts_find_the_executor(tmp_path):
    script = tmp_path / "old.py"
    script.write_text("from horovod.ray import RayExecutor, ElasticRayExecutor\nimport horovod.ray, hvkeras.ray\n"
                      "assert RayExecutor is hvkeras.ray.RayExecutor\nprint('found')\n")
    done = subprocess.run([str(BIN / "hvkeras"), "exec", "--as-horovod", str(script)], cwd=tmp_path,
                          env=clean_environment(tmp_path), capture_output=True, text=True, timeout=60)
    assert done.stdout == "found\n", done.stderr
