"""Unmodified Horovod scripts."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvkeras.tensorflow.keras
from harness import Outcome
from harness.launchers import BIN, clean_environment
from hvkeras.cli.exec import prepare
from hvkeras.errors import UsageError
from hvkeras.horovod import as_horovod
from launch.hvkeras_run import run

OLD = Path(__file__).parent / "workers" / "old_script.py"
SEMANTICS = OLD.with_name("semantics.py")
IN_GRAPHS = OLD.with_name("graph_script.py")


def require_same(found: list[dict[str, Any]], arguments: list[str]) -> None:
    assert sorted(rank["rank"] for rank in found) == [0, 1]
    for rank in found:
        assert rank["size"] == 2
        assert rank["weights"] == found[0]["weights"]
        assert rank["child"] == "hvkeras.keras"
        assert "has no horovod.torch: it supports TensorFlow and Keras" in rank["torch"]
        assert rank["engine"] == []
        assert (rank["argv"], rank["name"], rank["error"]) == (arguments, "__main__", "hvkeras.errors")


def told(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in re.findall(r"OLD (\{.*?\})$", text, re.MULTILINE)]


def require_ways_of_keras_2(found: list[dict[str, Any]], legacy: bool) -> None:
    for rank in found:
        ways = rank["ways"]
        indices, same = ways.pop("places"), ways.pop("same")
        assert indices == list(range(len(indices)))
        assert all(same)
        assert ways.pop("slots") == 9 + (not legacy)  # of Adam; on Keras 3, the learning rate is a variable
        only = {"lr=": 0.5, "stepped": [1.5, -4.5, 2], "evaluated": True, "predicted": [8, 2]}
        assert ways == {"rate": 0.5, "assigned": 0.25, "set": 0.125, "apart": False, **({} if legacy else only)}


@pytest.mark.parametrize(("backend", "legacy"), [
    pytest.param("native", False, marks=pytest.mark.slow),
    *(pytest.param(*pair, marks=pytest.mark.nightly) for pair in (
        ("horovod", False), ("tfdist", False), ("native", True), ("horovod", True), ("tfdist", True))),
])
def test_the_launcher_has_the_flag(backend: str, legacy: bool, tmp_path: Path) -> None:
    done = run(["--as-horovod", "-np", "2", "--backend", backend, sys.executable, str(OLD), "--epochs", "3"],
               tmp_path, {"HOROVOD_CYCLE_TIME": "2", "TF_USE_LEGACY_KERAS": str(int(legacy))})
    assert done.returncode == 0, done.stderr
    require_same(told(done.stdout), ["--epochs", "3"])
    require_ways_of_keras_2(told(done.stdout), legacy)
    features = re.findall(r"hvkeras: (.*) is of Keras 2; --as-horovod", done.stderr)
    assert ("optimizer.lr" in features) == (not legacy) and "evaluate_generator()" not in features, features
    assert len(features) == len(set(features))
    assert "did not start this fit from the same weights" not in done.stderr  # one step, before the elastic state
    assert done.stderr.count("ignored: HOROVOD_CYCLE_TIME (there are no cycles") == (backend != "horovod")


@pytest.mark.slow
def test_a_forgotten_broadcast_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("""
import horovod.keras as hvd
import keras
import numpy as np

hvd.init()
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
model.fit(np.ones((64, 4)), np.ones(64), verbose=0)
""")
    done = run(["--as-horovod", "-np", "2", "--backend", "native", sys.executable, "train.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("hvkeras: the ranks did not start this fit from the same weights") == 1
    assert done.stderr.count("HINT: add hvd.callbacks.BroadcastGlobalVariablesCallback(0)") == 1


@pytest.mark.nightly  # `of_both` also starts a script in this way
def test_other_launchers_start_it_by_a_command(launch: Callable[..., Outcome]) -> None:
    outcome = launch("mpirun", BIN / "hvkeras", ("exec", "--as-horovod", str(OLD), "--epochs"), np=2,
                     backend="horovod", cold=True)
    require_same([found for rank in range(2) for found in told(outcome.stdout(rank))], ["--epochs"])


def trained_by_numpy(x: Any, y: Any) -> dict[str, list[float]]:
    """Return the weights of a linear regression: batches of 8, zero initial weights, a rate that halves each epoch."""
    weights, bias = np.zeros((4, 1)), np.zeros(1)
    velocity: tuple[Any, Any] = (0 * weights, 0 * bias)
    rate, losses = 0.1, []
    for epoch in range(3):
        rate, before = 0.1 * 0.5**epoch, rate
        velocity = tuple(each * rate / before for each in velocity)
        of_steps = []
        for start in range(0, len(x), 8):
            part = x[start : start + 8]
            error = part @ weights + bias - y[start : start + 8]
            of_steps.append((error**2).mean())
            gradients = 2 * part.T @ error / 8, 2 * error.mean(0)
            velocity = tuple(0.9 * each - rate * slope for each, slope in zip(velocity, gradients, strict=True))
            weights, bias = weights + velocity[0], bias + velocity[1]
        losses.append(float(np.mean(of_steps)))
    return {"weights": [*weights.ravel(), *bias], "loss": losses, "lr": [0.1, 0.05, 0.025]}


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["horovod", "native"])
def test_callbacks_work_in_sessions(backend: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(32, 4)).astype("float32")
    y = (x @ [[1.0], [-2], [3], [0.5]] + 0.1 * random.normal(size=(32, 1))).astype("float32")
    np.savez(tmp_path / "data.npz", x=x, y=y)
    done = run(["--as-horovod", "-np", "2", "--backend", backend, sys.executable, str(IN_GRAPHS)], tmp_path,
               {"TF_USE_LEGACY_KERAS": "1"})
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in re.findall(r"GRAPH (\{.*?\})$", done.stdout, re.MULTILINE)]
    assert len(found) == 2 and found[0] == found[1]
    assert found[0].pop("objects") == [1, [0, 1]]
    assert found[0] == {name: pytest.approx(values, rel=1e-4) for name, values in trained_by_numpy(x, y).items()}


@pytest.fixture(scope="module")
def of_both(tmp_path_factory: pytest.TempPathFactory, launch_once: Callable[..., Outcome]) -> Any:
    """Results of one script with Horovod itself and with hvkeras, on each of two ranks."""
    folder = tmp_path_factory.mktemp("semantics")
    keras_2 = {"TF_USE_LEGACY_KERAS": "1"}  # Horovod's optimizers and states only support Keras 2
    launch_once("mpirun", SEMANTICS, (str(folder / "theirs"),), np=2,
                env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1", **keras_2})
    launch_once("mpirun", BIN / "hvkeras", ("exec", "--as-horovod", str(SEMANTICS), str(folder / "ours")), np=2,
                backend="native", cold=True, env=keras_2)
    return [[json.loads((folder / f"{whose}.{rank}.json").read_text()) for whose in ("ours", "theirs")]
            for rank in range(2)]


@pytest.mark.nightly  # test_horovod_surface compares with NumPy
def test_results_and_gradients_are_those_of_horovod(of_both: Any) -> None:
    for (ours, *_), (theirs, *_) in of_both:
        can = {name: found for name, found in theirs.items() if not isinstance(found, str)}
        assert len(can) > 70
        assert {name: ours[name] for name in can} == can


@pytest.mark.nightly  # test_horovod_surface compares with NumPy
def test_errors_are_those_of_horovod(of_both: Any) -> None:
    for (_, ours, _), (_, theirs, _) in of_both:
        assert all(isinstance(kinds, list) for kinds in theirs.values())  # Horovod raises in each case
        assert {name: kinds[0] for name, kinds in theirs.items() if kinds[0] not in ours[name]} == {}


# Members of Horovod's classes that hvkeras does not have; docs/migrating.md gives the reasons.
NOT_OURS = {"on_hosts_updated", "restore_momentum", "allreduce_ops", "get_gradients"}
OF_ONE = {"MetricAverageCallback": {"variables"}, "UpdateBatchStateCallback": {"steps_per_epoch"}}


@pytest.mark.nightly  # the quick tests of these objects use their members
def test_classes_and_objects_have_the_members_of_horovods(of_both: Any) -> None:
    (*_, ours), (*_, theirs) = of_both[0]
    assert len(theirs) > 30
    lacking, different = [], {}
    for thing, members in theirs.items():
        own = ours[thing]["all"]
        for name in members["own"]:
            wanted = members["all"][name]
            if name not in own:
                lacking += [f"{thing}.{name}"] * (name not in NOT_OURS | OF_ONE.get(thing, set()))
            elif wanted is not None and own[name] is not None:
                odd = {parameter for parameter, default in wanted.items() if parameter != "self" and
                       (parameter not in own[name] or default not in ("required", own[name][parameter]))}
                different |= {f"{thing}.{name}": odd} if odd else {}
    assert (lacking, different) == ([], {})


def python(*arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=folder, env={**clean_environment(folder), **variables},
                          capture_output=True, text=True, check=False, timeout=120)


def test_modules_run_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import horovod, sys\nprint(horovod.__name__, __name__, sys.argv[1:])\n")
    done = python(str(BIN / "hvkeras"), "exec", "--as-horovod", "-m", "mine", "a", folder=tmp_path)
    assert (done.stdout, done.stderr) == ("hvkeras __main__ ['a']\n", "")


def test_a_command_after_two_dashes_runs_with_the_alias_in_its_python_processes(tmp_path: Path) -> None:
    code = "import horovod, os, sys; print(horovod.__name__, os.environ['HOROVOD_SIZE'], sys.argv[1:])"
    command = ("sh", "-c", f'"{sys.executable}" -c "{code}" --as-horovod')
    launcher = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = python(str(BIN / "hvkeras"), "exec", "--as-horovod", "--", *command, folder=tmp_path, **launcher)
    assert (done.stdout, done.stderr) == ("hvkeras 1 ['--as-horovod']\n", "")
    done = python(str(BIN / "hvkeras"), "exec", "--as-horovod", "--", "none", folder=tmp_path)
    assert done.returncode == 127
    assert done.stderr.startswith("hvkeras exec: The command must start on every host (No such file or directory)")


@pytest.mark.parametrize(("arguments", "text"), [
    ("--as-horovod", "A script, a module or a command must follow --as-horovod"),
    ("--data-parallel --", "A script, a module or a command must follow --data-parallel"),
    ("--as-horovod --no-private-folders train.py", "Flags before the script must be those of hvkeras exec"),
    ("--data-parallel --as-horovod -- train.py", "A script must be written either for one process or for Horovod"),
    ("--as-horovod --data-parallel train.py", "A script must be written either for one process or for Horovod"),
    ("train.py --data-parallel", "--as-horovod or --data-parallel must come before the script"),
])
def test_flags_that_say_nothing_or_too_much_are_refused(arguments: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        prepare(arguments.split())
    assert str(caught.value).startswith(text)


def test_a_missing_script_is_reported(tmp_path: Path) -> None:
    done = python(str(BIN / "hvkeras"), "exec", "--as-horovod", "none.py", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("hvkeras exec: The script must be a file. Received: script='none.py'.")
    assert [line[:6] for line in done.stderr.splitlines()[1:]] == ["HINT: "]


def test_the_environments_own_sitecustomize_runs_as_well(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    paths = as_horovod.environment({"PYTHONPATH": str(tmp_path)})
    done = python("-c", "import horovod; print(horovod.__name__)", folder=tmp_path, **paths)
    assert (done.stdout, done.stderr) == ("mine\nhvkeras\n", "")
    assert as_horovod.environment(paths) == paths


@pytest.fixture
def installed() -> Iterator[None]:
    as_horovod.install()
    yield
    as_horovod.uninstall()


@pytest.mark.usefixtures("installed")
def test_a_module_has_two_names_and_is_one() -> None:
    import horovod.tensorflow.keras as twin

    assert twin is hvkeras.tensorflow.keras
    assert twin.__spec__.name == "hvkeras.tensorflow.keras"
    assert importlib.import_module("horovod.tensorflow.keras.callbacks") is hvkeras.tensorflow.keras.callbacks


def of_horovod() -> set[str]:
    return {name for name in sys.modules if name == "horovod" or name.startswith("horovod.")}


def test_horovod_itself_is_there_for_the_engine_and_afterwards() -> None:
    before, modules = importlib.util.find_spec("horovod"), of_horovod()
    as_horovod.install()
    try:
        with as_horovod.horovod_itself():
            inside = importlib.util.find_spec("horovod")
        assert importlib.import_module("horovod").__name__ == "hvkeras"
    finally:
        as_horovod.uninstall()
    assert before is not None
    assert inside is not None
    assert inside.origin == before.origin
    assert of_horovod() == modules
