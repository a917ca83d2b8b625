"""`hvd.elastic` and `hvkeras run --reset-limit`: after the loss of a rank, training resumes from the last commit."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.hvkeras_run import Started, python, run, warm_ranks

WORKER = Path(__file__).parent / "workers" / "elastic.py"
SURVIVES = WORKER.with_name("survives.py")
SHARED = WORKER.with_name("elastic_shared.py")
GRAPHS = WORKER.with_name("graphs_outlive.py")
SESSION = WORKER.with_name("session_elastic.py")
HOROVODS = WORKER.with_name("horovods_elastic.py")


@pytest.mark.parametrize(("backend", "victim", "legacy"), [
    pytest.param("native", 1, "0", marks=pytest.mark.slow), pytest.param("tfdist", 0, "0", marks=pytest.mark.nightly),
    pytest.param("horovod", 1, "1", marks=pytest.mark.nightly),
])
def test_training_is_as_if_no_rank_had_been_lost(backend: str, victim: int, legacy: str, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    env = {"TF_USE_LEGACY_KERAS": legacy, "TMPDIR": str(tmp_path / "tmp")}
    command = warm_ranks([sys.executable, str(WORKER), str(tmp_path / "marker"), str(victim)], env)
    done = run(["-np", "2", "--reset-limit", "2", "--backend", backend, "--output-filename", str(tmp_path / "logs"),
                *command], tmp_path, env, deadline=240)
    assert done.returncode == 0, done.stderr
    ended = ["trained 4 epochs, 20 steps", "right: True"]
    for rank in range(2):
        assert (tmp_path / "logs" / f"rank.{rank}" / "stdout").read_text().splitlines() == [
            "begins with epoch 0 at step 0", "built anew", "begins with epoch 1 at step 6",  # all ranks raise
            f"begins with epoch 2 at step {10 if victim else 12}", *ended,  # all are restarted
            *ended]  # and once more, after training
    assert "restarts from the last commit after HorovodInternalError: all ranks stumble" in done.stderr
    assert f"rank {victim} on " in done.stderr
    assert ("resumes from the commit before the last one: commit-0 is damaged" in done.stderr) == bool(victim)
    assert "does not call the function again" in done.stderr
    assert done.stderr.count("restarts all ranks, reset 1 of at most 2") == 1
    assert done.stderr.count("restarts all ranks, reset 2 of at most 2") == 1
    assert not list((tmp_path / "tmp").glob("hvkeras-*"))


def test_starts_are_limited_and_the_failure_comes_last(tmp_path: Path) -> None:
    done = run(["-np", "2", "--reset-limit", "2", *python("print('up'); time.sleep(0.5)\nif rank: 1 / 0")], tmp_path)
    assert done.returncode == 1
    assert done.stdout.count("[1] up") == 3
    assert [line for line in done.stderr.splitlines() if "starts all" in line] == [
        f"hvkeras run: restarts all ranks, reset {number} of at most 2" for number in (1, 2)]
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"


def survivors(tmp_path: Path, events: str, np: int = 3, data: str = "arrays", backend: str = "native",
              **env: str) -> subprocess.CompletedProcess[str]:
    """Run a job whose workers fail, until it has the initial number of ranks again.

    It must succeed without a restart, with equal weights that have counted each sample once per epoch.
    """
    command = warm_ranks([sys.executable, str(SURVIVES), data, events], env)
    done = run(["-np", str(np), "--min-np", "1", "--max-np", str(np), "--backend", backend, *command], tmp_path, env)
    assert done.returncode == 0, done.stderr
    assert "restarts all ranks" not in done.stderr
    ended = [line[4:] for line in done.stdout.splitlines() if line[4:].startswith("trained")]
    assert len(ended) == np
    assert len(set(ended)) == 1
    assert re.fullmatch(r"trained \d+ epochs, every sample once in each", ended[0]), ended
    return done


@pytest.mark.parametrize(("events", "np", "data", "lost"), [
    pytest.param("1:kill:7", 3, "arrays", ["rank 1 on .* (ended unexpectedly|was killed by SIGKILL)"],
                 marks=pytest.mark.slow),
    pytest.param("0:raise:7", 2, "dataset", ["rank 0 on .* failed with ArithmeticError: stumbles"],
                 marks=pytest.mark.slow),
    pytest.param("0:raise:27", 2, "shuffled", ["rank 0 on .* failed with ArithmeticError: stumbles"],
                 marks=pytest.mark.slow),
    pytest.param("2:kill:7 0:kill:12", 4, "arrays", ["rank 2 on .* (ended|was)", "rank 0 on .* (ended|was)"],
                 marks=pytest.mark.slow),
    ("1:stop:7", 2, "loop", ["rank 1 on .* gave no sign of life"]),
    pytest.param("1:kill:40", 2, "batches", ["rank 1 on .* (ended unexpectedly|was killed by SIGKILL)"],
                 marks=pytest.mark.nightly),
], ids=["killed", "raises", "raises, shuffled before", "two, and rank 0", "stopped, in a loop",
        "killed, with a PyDataset"])
def test_survivors_keep_their_processes_and_count_each_sample_once(events: str, np: int, data: str, lost: list[str],
                                                                   tmp_path: Path) -> None:
    done = survivors(tmp_path, events, np, data, HVKERAS_LIVENESS_TIMEOUT="2", GPUS=str(np))
    for reason in lost:
        assert re.search(rf"resumes with \d ranks? from commit \d+, \d+\.\d s after {reason}", done.stderr), done.stderr
    assert re.search(rf"resumes with {np} ranks from commit \d+, \d+\.\d s after new hosts were found", done.stderr)
    gpus = re.findall(r"GPU of each rank: ([\d, ]+);", done.stderr)
    assert all(len(set(of_ranks.split(", "))) == len(of_ranks.split(", ")) for of_ranks in gpus)  # also of new workers
    assert len(gpus[0].split(", ")) == len(gpus[-1].split(", ")) == np


@pytest.mark.nightly
def test_a_worker_that_is_stopped_while_it_starts_is_replaced(tmp_path: Path) -> None:
    env = {"HVKERAS_LIVENESS_TIMEOUT": "2"}
    command = warm_ranks([sys.executable, str(SURVIVES), "arrays", "1:kill:7"], env)
    stops = ["sh", "-c", '[ "$HVKERAS_RUN_WORKER" = 2 ] && kill -STOP $$; exec "$@"', "sh"]
    done = run(["-np", "2", "--min-np", "2", *stops, *command], tmp_path, env)
    assert done.returncode == 0, done.stderr
    assert re.search(r"worker 2 on \S+, which was to join, gave no sign of life for 2 s \(stopped\)", done.stderr)
    assert done.stderr.count("which was to join") == 1
    assert re.search(r"resumes with 2 ranks from commit \d+", done.stderr)
    assert sum("every sample once in each" in line for line in done.stdout.splitlines()) == 2


@pytest.mark.slow
def test_survivors_keep_their_processes_on_horovods_engine(tmp_path: Path) -> None:
    done = survivors(tmp_path, "1:kill:7", backend="horovod")
    assert re.search(r"resumes with 2 ranks from commit \d+, \d+\.\d s after rank 1 on", done.stderr), done.stderr


@pytest.mark.nightly
def test_process_sets_of_an_elastic_job_on_horovod_must_be_asked_for(tmp_path: Path) -> None:
    script = python("import hvkeras as hvd\nhvd.init('horovod')\nhvd.add_process_set([0])\nhvd.barrier()"
                    "\nprint('made')")
    flags = ["-np", "2", "--min-np", "2", "--reset-limit", "0", "--backend", "horovod"]
    done = run([*flags, *script], tmp_path)
    assert "set HOROVOD_DYNAMIC_PROCESS_SETS=1, or use the backend native" in done.stderr
    assert "made" not in done.stdout
    done = run([*flags, *script], tmp_path, {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
    assert (done.returncode, done.stdout.count("made")) == (0, 2), done.stderr


@pytest.mark.slow
def test_the_script_restarts_in_each_survivor_where_the_engine_cannot(tmp_path: Path) -> None:
    done = survivors(tmp_path, "1:kill:7", backend="tfdist")
    assert re.search(r"resumes with 2 ranks from commit 1, \d+\.\d s after rank 1 on", done.stderr), done.stderr
    pids = re.findall(r"^\[2\] pid (\d+)$", done.stdout, re.MULTILINE)
    assert len(pids) > 1
    assert len(set(pids)) == 1


@pytest.mark.slow
def test_one_callback_makes_fit_elastic(tmp_path: Path) -> None:
    env = {"PAUSE": "0.05"}
    command = warm_ranks([sys.executable, str(SURVIVES), "callback", "1:kill:12"], env)
    done = run(["-np", "3", "--min-np", "2", *command], tmp_path, env)
    assert done.returncode == 0, done.stderr
    assert "resumes with 2 ranks" in done.stderr
    assert "resumes with 3 ranks" in done.stderr
    lines = [line[4:] for line in done.stdout.splitlines() if "waves" not in line]
    assert sorted(lines) == ["history [0, 1, 2, 3, 4, 5] 6"] * 3 + ["trained 6 epochs, every sample once in each"] * 3


@pytest.mark.nightly
def test_a_loss_gives_the_weights_of_a_run_that_was_told_to_shrink_at_that_commit(tmp_path: Path) -> None:
    found = []
    for event in ("2:drop=2:8", "0:shrink=2:4"):  # there is a commit after 5 steps
        folder = tmp_path / event.replace(":", ".")
        folder.mkdir()
        (folder / "hosts").write_text("localhost:3\n")
        command = warm_ranks([sys.executable, str(SURVIVES), "callback", event], {})
        done = run(["-np", "3", "--min-np", "2", "--host-discovery-script", "cat hosts", *command], folder)
        assert done.returncode == 0, done.stderr
        assert re.findall(r"resumes with (\d) ranks from commit (\d+)", done.stderr) == [("2", "1")], done.stderr
        assert sum("every sample once in each" in line for line in done.stdout.splitlines()) == 2
        found.append({line[4:] for line in done.stdout.splitlines() if "waves" in line})
    assert len(found[0]) == 1
    assert found[0] == found[1]


@pytest.mark.parametrize(("backend", "np", "most", "optimizer", "ends", "events", "said"), [
    ("native", 3, 3, "Adam", 3, "1:kill:7", "resumes with 2 ranks from commit 2"),
    *[pytest.param(*case, marks=pytest.mark.nightly) for case in [
        ("native", 4, 4, "Lamb", 4, "2:kill:7 0:raise:13", "failed with ArithmeticError"),
        ("native", 4, 4, "AdamW+clipnorm", 1, "0:slots=1:8", "resumes with 1 rank from commit"),
        ("native", 1, 3, "Adafactor", 3, "0:slots=3:4", "resumes with 3 ranks from commit"),
        ("native", 3, 3, "fit:Adam", 0, "1:kill:7", "resumes with 2 ranks from commit"),
        ("native", 4, 4, "Adam", 4, "0:kill:16 1:kill:16 2:kill:16", "restores the last commit on disk"),
        ("horovod", 3, 3, "Adam+global_clipnorm", 3, "1:kill:7", "resumes with 2 ranks from commit 2"),
        ("tfdist", 3, 3, "Adam", 3, "0:kill:7", "resumes with 2 ranks from commit 2"),
    ]],
])
@pytest.mark.parametrize("legacy", ["0", pytest.param("1", marks=pytest.mark.nightly)])
def test_parts_of_an_optimizer_outlive_the_ranks_that_shared_its_update(
        backend: str, np: int, most: int, optimizer: str, ends: int, events: str, said: str, legacy: str,
        tmp_path: Path) -> None:
    if legacy == "1" and optimizer == "Lamb":
        pytest.skip("tf_keras has no Lamb")
    (tmp_path / "hosts").write_text(f"localhost:{np}\n")
    env = {"TF_USE_LEGACY_KERAS": legacy}
    command = warm_ranks([sys.executable, str(SHARED), optimizer, str(ends), events], env)
    done = run(["-np", str(np), "--min-np", "1", "--max-np", str(most), "--backend", backend,
                "--host-discovery-script", "cat hosts", *command], tmp_path, env, deadline=240)
    assert done.returncode == 0, done.stderr
    assert said in done.stderr, done.stderr
    lines = [line[4:] for line in done.stdout.splitlines()]
    assert lines == ["as one process: True"] * (ends or len(lines))
    assert lines
    assert done.stderr.count("MiB as backup of other ranks") == 1


@pytest.mark.parametrize(("backend", "legacy"), [
    pytest.param("native", "0", marks=pytest.mark.oldest), pytest.param("horovod", "1", marks=pytest.mark.slow),
    *(pytest.param(*case, marks=pytest.mark.nightly) for case in [("native", "1"), ("horovod", "0")]),
])
def test_what_was_traced_before_a_change_works_after_it(backend: str, legacy: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost:2\n")
    env = {"TF_USE_LEGACY_KERAS": legacy}
    command = warm_ranks([sys.executable, str(GRAPHS), "2", "3", "1", "2"], env)
    done = run(["-np", "2", "--min-np", "1", "--max-np", "3", "--backend", backend, "--host-discovery-script",
                "cat hosts", *command], tmp_path, env)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"resumes with (\d) rank", done.stderr) == ["3", "1", "2"]
    assert list(dict.fromkeys(re.findall(r"^\[0\] right with (\d)", done.stdout, re.MULTILINE))) == ["2", "3", "1"]
    assert done.stdout.count("done") == 2


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["native", "horovod"])
def test_sessions_outlive_changes_as_their_programs_restart(backend: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost:2\n")
    command = warm_ranks([sys.executable, str(SESSION), "2", "3", "1"])
    done = run(["-np", "2", "--min-np", "1", "--backend", backend, "--host-discovery-script", "cat hosts", *command],
               tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"resumes with (\d) rank", done.stderr) == ["3", "1"]
    assert re.findall(r"^\[\d\] (trained on \d)$", done.stdout, re.MULTILINE) == ["trained on 1"]


def horovods(tmp_path: Path, backend: str, kind: str, flags: list[str], *events: str, legacy: str = "0",
             ) -> tuple[subprocess.CompletedProcess[str], list[tuple[int, int]]]:
    """Run an elastic script from Horovod's documentation, and return rank 0's completed epochs with their sizes."""
    (tmp_path / "hosts").write_text("localhost:2\n")
    env = {"TF_USE_LEGACY_KERAS": legacy}
    command = warm_ranks([sys.executable, str(HOROVODS), kind, "6", *events], env)
    done = run(["--as-horovod", "-np", "2", "--min-np", "1", "--backend", backend, *flags, *command], tmp_path, env)
    return done, [(int(epoch), int(size)) for epoch, size in re.findall(r"^\[0\] epoch (\d) on (\d)$", done.stdout,
                                                                        re.MULTILINE)]


@pytest.mark.parametrize(("backend", "kind", "legacy", "event"), [
    ("native", "keras", "0", "kill"),
    pytest.param("horovod", "loop", "0", "raise", marks=pytest.mark.slow),
    *(pytest.param(backend, kind, legacy, event, marks=pytest.mark.nightly)
      for backend in ("native", "horovod") for kind in ("loop", "keras") for legacy in ("0", "1")
      for event in ("kill", "raise")
      if (backend, kind, legacy, event) not in (("native", "keras", "0", "kill"), ("horovod", "loop", "0", "raise"))),
])
def test_scripts_as_horovod_documents_them(backend: str, kind: str, legacy: str, event: str, tmp_path: Path) -> None:
    # a loss and the replacement count as one reset
    flags = ["--host-discovery-script", "cat hosts", "--reset-limit", "3"]
    done, epochs = horovods(tmp_path, backend, kind, flags, "0:slots=3", f"2:{event}", "4:slots=2", legacy=legacy)
    assert done.returncode == 0, done.stderr
    assert epochs == [(0, 2), (1, 3), (2, 2), (3, 3), (4, 3), (5, 2)]
    trained = re.findall(r"^\[\d\] trained (.*)$", done.stdout, re.MULTILINE)
    assert trained == [f"{sum((size + 1) / 2 for _, size in epochs):g}"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", pytest.param("horovod", marks=pytest.mark.nightly)])
def test_every_reset_counts_as_it_does_in_horovod(backend: str, tmp_path: Path) -> None:
    flags = ["--host-discovery-script", "cat hosts", "--reset-limit", "1"]
    done, epochs = horovods(tmp_path, backend, "loop", flags, "0:slots=3", "2:slots=2")
    assert epochs == [(0, 2), (1, 3), (2, 3)]
    assert done.returncode == 1
    assert "hvkeras run: ranks have changed more often than --reset-limit allows" in done.stderr
    assert "trained" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "limit"), [
    ("native", "0"), *(pytest.param(*case, marks=pytest.mark.nightly)
                       for case in [("native", "1"), ("horovod", "0"), ("horovod", "1")])])
def test_hosts_that_stay_the_same(backend: str, limit: str, tmp_path: Path) -> None:
    done, epochs = horovods(tmp_path, backend, "loop", ["-H", "localhost:2", "--reset-limit", limit], "1:kill")
    if limit == "0":
        assert (bool(done.returncode), epochs) == (True, [(0, 2)])
        assert "more often than --reset-limit allows" in done.stderr
    else:
        assert (done.returncode, epochs) == (0, [(0, 2), (1, 1), *((epoch, 2) for epoch in range(2, 6))])


@pytest.mark.slow
def test_hosts_come_and_go_while_a_job_trains(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost:2\n")
    command = warm_ranks([sys.executable, str(SURVIVES), "arrays", "0:hosts=4:7"], {})
    flags = ["-np", "2", "--min-np", "1", "--max-np", "4", "--host-discovery-script", "cat hosts"]
    done = run([*flags, *command], tmp_path)
    assert done.returncode == 0, done.stderr
    sizes = re.findall(r"resumes with (\d) rank", done.stderr)
    assert (sizes[-1], "4" in sizes) == ("1", True), done.stderr
    assert [line for line in done.stdout.splitlines() if "trained" in line] == [
        line for line in done.stdout.splitlines() if line.startswith("[0] trained") and "every sample once" in line]


@pytest.mark.slow
def test_a_rank_that_is_told_to_end_leaves_at_the_next_commit(tmp_path: Path) -> None:
    command = warm_ranks([sys.executable, str(SURVIVES), "callback", "1:leave:12"], {})
    done = run(["-np", "3", "--min-np", "2", *command], tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"worker 1 on \S+ received SIGTERM, and leaves at the next commit, within 25 s", done.stderr)
    assert re.findall(r"resumes with (\d) ranks from commit \d+, \d\.\d s after new hosts", done.stderr) == ["2"]
    assert sum("every sample once in each" in line for line in done.stdout.splitlines()) == 2


@pytest.mark.slow
def test_all_ranks_start_again_where_none_survives(tmp_path: Path) -> None:
    command = warm_ranks([sys.executable, str(SURVIVES), "arrays", "0:kill:7 1:kill:7"], {})
    done = run(["-np", "2", "--min-np", "1", *command], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("restarts all ranks, reset 1 of at most 3") == 1
    assert sum("every sample once" in line for line in done.stdout.splitlines()) == 2


@pytest.mark.slow
def test_too_few_slots_are_waited_for_until_the_deadline(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost:2\n")
    code = "print('up'); time.sleep(0.5)\nif rank: open('hosts', 'w').write('localhost:1'); 1 / 0"
    done = run(["-np", "2", "--host-discovery-script", "cat hosts", "--elastic-timeout", "4", *python(code)], tmp_path)
    assert done.returncode == 1
    found = "at least 2 are needed and 1 is available"
    assert re.search(rf"hvkeras run: waiting for slots, \d s of 4 s: {found}\n", done.stderr), done.stderr
    assert f"There must be slots for the ranks, but {found} after 4 s. Received: slots={{'local" in done.stderr


@pytest.mark.parametrize("code", ["sys.exit(0)", "time.sleep(1000)"], ids=["success", "Ctrl-C"])
def test_what_is_no_failure_starts_nothing_again(code: str, tmp_path: Path) -> None:
    started = Started(["-np", "1", "--reset-limit", "3", *python(f"print('up'); {code}")], tmp_path)
    started.wait_for("up")
    if "sleep" in code:
        started.process.send_signal(signal.SIGINT)
    done = started.finish()
    assert done.returncode == (130 if "sleep" in code else 0)
    assert "restarts all ranks" not in done.stderr
    assert started.orphans == []


def test_a_command_that_cannot_start_is_started_once(tmp_path: Path) -> None:
    done = run(["-np", "1", "--reset-limit", "3", "no-such-command"], tmp_path)
    assert done.returncode == 127
    assert "restarts all ranks" not in done.stderr


def test_rank_0_elsewhere_needs_a_folder_there(tmp_path: Path) -> None:
    done = run(["-np", "1", "-H", "far.example:1", "--reset-limit", "3", "true"], tmp_path)
    assert done.returncode == 2
    assert "set HVKERAS_ELASTIC_DIR" in done.stderr


def test_limits_are_numbers(tmp_path: Path) -> None:
    done = run(["-np", "1", "--reset-limit", "-1", "true"], tmp_path)
    assert done.returncode == 2
    assert "a limit is 0 or more, not -1" in done.stderr
