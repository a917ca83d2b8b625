"""`hvkeras run`: the ranks' environment, their output, and valid command lines."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from argparse import Namespace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

import hvkeras
from harness.launchers import BIN, clean_environment
from hvkeras.cli.run import _check_script
from hvkeras.errors import UsageError
from hvkeras.launcher.run_arguments import parse, parser
from launch.hvkeras_run import python, run


def test_every_rank_runs_the_command_with_its_own_arguments(tmp_path: Path) -> None:
    done = run(["-np", "3", *python("print(rank, sys.argv[1:])"), "--epochs", "3", "-np", "9"], tmp_path)
    assert done.returncode == 0
    expected = [f"[{rank}] {rank} ['--epochs', '3', '-np', '9']" for rank in range(3)]
    assert sorted(done.stdout.splitlines()) == expected
    cores = len(os.sched_getaffinity(0))
    shown = done.stderr.splitlines()
    assert shown[-2] == "hvkeras run: no rank has called hvd.init(): they were 3 independent programs."
    assert re.fullmatch(r"HINT: call hvd.init\(\), .* --tf-config, .*--as-horovod", shown[-1])
    assert len(shown) == 2 + (cores < 3)


@pytest.mark.parametrize("given", ["--as-horovod", "--as-horovod of exec", "--data-parallel of exec"])
def test_a_flag_that_was_given_is_not_recommended(given: str, tmp_path: Path) -> None:
    flag = given.partition(" ")[0]
    command = python("print(rank)")
    if given != flag:
        command = [str(BIN / "hvkeras"), "exec", flag, "--", *command]
    done = run(["-np", "2", *([flag] if given == flag else []), *command], tmp_path)
    assert done.returncode == 0, done.stderr
    hint = done.stderr.splitlines()[-1]
    assert re.fullmatch(r"HINT: call hvd.init\(\), or start .*", hint)
    assert flag not in hint and "--tf-config" in hint
    assert ("--data-parallel" in hint) == ("--as-horovod" not in hint)


def test_ranks_that_share_cores_are_reported_once(tmp_path: Path) -> None:
    bound = ["taskset", "-c", str(min(os.sched_getaffinity(0))), str(BIN / "hvkeras"), "run"]
    said = ("hvkeras run: 2 ranks share 1 core, so each step takes longer than with 1 rank. HINT: -np 1, or more hosts"
            " (-H)\n")
    for level, line in (("WARNING", said), ("ERROR", "")):
        done = subprocess.run([*bound, "-np", "2", "--tf-config", "--log-level", level, "true"], cwd=tmp_path,
                              env=clean_environment(tmp_path), capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, line)


def test_programs_that_know_each_other_by_other_means_are_no_mistake(tmp_path: Path) -> None:
    done = run(["-np", "2", "--tf-config", *python("print(rank)")], tmp_path)
    assert done.stderr == ""
    assert run(["-np", "1", *python("print(rank)")], tmp_path).stderr == ""


@pytest.mark.slow  # waits for timeouts
def test_programs_that_do_not_come_together_are_told_while_they_run(tmp_path: Path) -> None:
    done = run(["-np", "2", *python("import time; time.sleep(32)")], tmp_path)
    assert re.fullmatch(r"hvkeras run: no rank has called hvd.init\(\) in 30 s; without it, they are 2 independent"
                        r" programs.\nHINT: .*\n", done.stderr)


def test_a_report_may_have_its_folder_as_a_word_of_its_own(tmp_path: Path) -> None:
    command = python("print(os.path.basename(os.environ['HVKERAS_REPORT']), sys.argv[1:])")
    done = run(["--report", "out", "-np", "1", *command, "--report", "out", "-np", "9"], tmp_path)
    assert done.stdout == "[0] out ['--report', 'out', '-np', '9']\n"
    first, second = done.stderr.splitlines()
    assert first.startswith("hvkeras run: --report will be passed to the command, since flags of hvkeras run must")
    assert second == f"hvkeras: the report on this run is {tmp_path / 'out' / 'report.html'}"


@pytest.mark.parametrize(("words", "folder", "command"), [
    (["--report", "out", "python", "a.py"], "out", ["python", "a.py"]),
    (["--report", "./out/python", "--backend", "native", "python", "a.py"], "./out/python", ["python", "a.py"]),
    (["--report=python", "python", "a.py"], "python", ["python", "a.py"]),
    (["--report", "python", "a.py", "--report", "python"], "hvkeras-report", ["python", "a.py", "--report", "python"]),
    (["--report", "python", "-u", "a.py"], "hvkeras-report", ["python", "-u", "a.py"]),
    (["--report", "--backend", "native", "python", "a.py"], "hvkeras-report", ["python", "a.py"]),
    (["--report", "--", "out", "python"], "hvkeras-report", ["out", "python"]),
    (["--report", "pyhton", "a.py"], "hvkeras-report", ["pyhton", "a.py"]),
    (["python", "a.py", "--report", "", "out"], None, ["python", "a.py", "--report", "", "out"]),
    (["python", "a.py", "--report", "out"], None, ["python", "a.py", "--report", "out"]),
])
def test_the_word_after_report_is_a_folder_or_the_command(words: list[str], folder: str | None, command: list[str],
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    found = parse(["-np", "2", *words])
    assert (found.report, found.command) == (folder, command)


def test_what_hvkeras_run_gets_by_mistake_is_reported(tmp_path: Path) -> None:
    done = run([*python("print(rank)"), "-np", "2"], tmp_path)
    assert done.returncode == 2
    assert "-np will be passed to the command, since flags of hvkeras run must come before the command" in done.stderr
    (tmp_path / "train.py").write_text("print(1)")
    done = run(["-np", "1", "./train.py"], tmp_path)
    assert done.returncode == 126
    assert "HINT: scripts are started by Python: hvkeras run ... python ./train.py" in done.stderr


def test_ranks_get_their_place_and_a_secret_that_is_on_no_command_line(tmp_path: Path) -> None:
    code = """
import psutil
own = {name: value for name, value in os.environ.items() if name.startswith("HVKERAS_")}
lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
shown = not any(sys.executable in line for line in lines) or any(own["HVKERAS_SECRET"] in line for line in lines)
print("size", own["HVKERAS_RUN_SIZE"], "local", own["HVKERAS_RUN_LOCAL_RANK"], own["HVKERAS_RUN_LOCAL_SIZE"],
      "at", own["HVKERAS_RUN_CONTROL"].split(":")[0], "secret", len(own["HVKERAS_SECRET"]), "shown", shown,
      "unbuffered", os.environ["PYTHONUNBUFFERED"], "quiet", os.environ["TF_CPP_MIN_LOG_LEVEL"])
"""
    done = run(["-np", "2", *python(code)], tmp_path)
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] size 2 local {rank} 2 at 127.0.0.1 secret 64 shown False unbuffered 1 quiet 2" for rank in (0, 1)]


def test_each_job_has_a_secret_of_its_own(tmp_path: Path) -> None:
    command = ["-np", "1", *python("print(os.environ['HVKERAS_SECRET'])")]
    first, second = (run(command, tmp_path, env={"HVKERAS_SECRET": "that of another job"}).stdout for _ in range(2))
    assert len({first, second, "[0] that of another job\n"}) == 3
    done = run(command, tmp_path, env={"HVKERAS_SECRET": "mine"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("hvkeras run: HVKERAS_SECRET must have at least 16 bytes")


def test_flags_that_are_settings_reach_the_ranks(tmp_path: Path) -> None:
    code = "print(*(os.environ['HVKERAS_' + name] for name in ('BACKEND', 'START_TIMEOUT', 'NETWORK_INTERFACES')))"
    done = run(["-np", "1", "--backend", "tfdist", "--start-timeout", "9", "--network-interface", "lo",
                *python(code)], tmp_path)
    assert done.stdout == "[0] tfdist 9.0 lo\n"


def test_what_a_rank_starts_by_itself_is_no_rank_of_horovodrun(tmp_path: Path) -> None:
    code = """
import subprocess
own = {name: value for name, value in os.environ.items() if not name.startswith("HVKERAS_RUN_")}
child = "from hvkeras.control.launch_environments import detect_launch; print(detect_launch())"
print(os.environ["HOROVOD_RANK"], subprocess.run([sys.executable, "-c", child], env=own, text=True, stdout=-1).stdout)
"""
    done = run(["-np", "1", *python(code)], tmp_path)
    assert done.stdout.startswith("[0] 0 Launch(launcher='none', rank=0, size=1,"), done.stderr


def test_what_the_user_set_stays(tmp_path: Path) -> None:
    done = run(["-np", "1", *python("print(os.environ['TF_CPP_MIN_LOG_LEVEL'])")], tmp_path,
               env={"TF_CPP_MIN_LOG_LEVEL": "1"})
    assert done.stdout == "[0] 1\n"


def test_streams_stay_apart_and_lines_whole(tmp_path: Path) -> None:
    code = """
for number in range(200):
    for part in (f"{rank}:", "x" * 50, f":{number}"):
        sys.stdout.write(part)
        sys.stdout.flush()
    print()
print("complaint", file=sys.stderr)
sys.stdout.write("no end of line")
"""
    done = run(["-np", "2", *python(code)], tmp_path)
    for rank in (0, 1):
        mine = [line for line in done.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] {rank}:{'x' * 50}:{number}" for number in range(200)] + [f"[{rank}] no end of line"]
    # the last line is the launcher's
    assert sorted(done.stderr.splitlines()[:-2]) == ["[0] complaint", "[1] complaint"]


@pytest.mark.slow
def test_every_line_of_many_ranks_arrives_once_on_the_screen_and_in_the_files(tmp_path: Path) -> None:
    code = 'i=0; while [ $i -lt 100 ]; do echo "$HVKERAS_RUN_RANK $i"; i=$((i+1)); done; echo end >&2'
    done = run(["-np", "200", "--output-filename", "logs", "sh", "-c", code], tmp_path)
    assert done.returncode == 0, done.stderr
    shown: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        prefix, rest = line.split(" ", 1)
        shown.setdefault(prefix, []).append(f"{rest}\n")
    assert shown == {f"[{rank}]": [f"{rank} {number}\n" for number in range(100)] for rank in range(200)}
    lines = [line for line in done.stderr.splitlines()[:-2] if " share " not in line]  # cores
    assert sorted(lines) == sorted(f"[{rank}] end" for rank in range(200))
    for rank in range(200):
        assert (tmp_path / "logs" / f"rank.{rank:03}" / "stdout").read_text() == "".join(shown[f"[{rank}]"])
        assert (tmp_path / "logs" / f"rank.{rank:03}" / "stderr").read_text() == "end\n"


def test_a_line_redrawn_by_carriage_returns_is_shown_once_in_a_file(tmp_path: Path) -> None:
    code = r"sys.stdout.write('\r 10%'); sys.stdout.flush(); time.sleep(0.1); sys.stdout.write('\b\b\b\r 99%\n')"
    assert run(["-np", "1", *python(code)], tmp_path).stdout == "[0]  99%\n"


def test_lines_begin_with_the_time_on_request(tmp_path: Path) -> None:
    for flag in ("-prefix-timestamp", "--prefix-output-with-timestamp"):
        done = run(["-np", "1", flag, *python("print('hello')")], tmp_path)
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[0\] hello\n", done.stdout)


def test_each_ranks_output_is_kept_as_it_was(tmp_path: Path) -> None:
    code = r"sys.stdout.write(f'\r1\r2 of {rank}\nopen end'); print('problem', rank, file=sys.stderr)"
    done = run(["-np", "2", "--output-filename", "logs", *python(code)], tmp_path)
    assert done.returncode == 0
    for rank in (0, 1):
        folder = tmp_path / "logs" / f"rank.{rank}"
        assert (folder / "stdout").read_bytes() == f"\r1\r2 of {rank}\nopen end".encode()
        assert (folder / "stderr").read_text() == f"problem {rank}\n"
        assert f"[{rank}] 2 of {rank}\n" in done.stdout


def test_verbose_says_each_step(tmp_path: Path) -> None:
    done = run(["-np", "1", "--verbose", *python("")], tmp_path)
    for step in ("control channel listens on 127.0.0.1:", "rank 0 runs on ", "rank 0 exited with code 0"):
        assert step in done.stderr


def test_ranks_get_an_empty_standard_input(tmp_path: Path) -> None:
    assert run(["-np", "1", *python("print(repr(sys.stdin.read()))")], tmp_path).stdout == "[0] ''\n"


@pytest.mark.parametrize(("arguments", "complaint"), [
    ([], "The command that the ranks run must be given"),
    (["-np", "2"], "The command that the ranks run must be given"),
    (["python", "train.py"], "The number of processes must be given. HINT: hvkeras run -np 2"),
    (["-np", "0", "true"], "at least 1. Received: np=0"),
    (["-np", "two", "true"], "invalid int value: 'two'). HINT: -np 2."),
    (["-np", "2", "--start-timeout", "0", "true"], "positive"),
    (["-np", "2", "--stall-check-shutdown-time-seconds=-1", "true"], "0 (never) or more, not -1"),
    (["-np", "2", "--verbos", "true"], "Received: flag='--verbos'. HINT: did you mean --verbose"),
    (["-np", "2", "--fusion-treshold-mb=3", "true"], "HINT: did you mean --fusion-threshold-mb."),
    (["-np", "2", "--timeline", "a.json", "true"], "HINT: did you mean --timeline-filename."),
    (["-np", "2", "--oversubscribe", "true"], "Received: flag='--oversubscribe'. HINT: see hvkeras run --help."),
    (["-np", "2", "--gloo", "true"], "does not take horovodrun's --gloo. HINT: leave it out."),
    (["-np", "2", "--min-np", "3", "true"], "1 <= --min-np <= -np <= --max-np must hold. Received: np=2, min_np=3"),
    (["-np", "2", "--elastic-timeout", "9", "true"], "is for elastic jobs. Received: elastic_timeout=9.0"),
    (["--max-np", "2", "true"], "The number of processes must be given. Received: max_np=2"),
    (["-np", "2", "-H", "a:2", "--host-discovery-script", "cat hosts", "true"], "Hosts must come from one source"),
    (["-np", "2", "--host-discovery-script", "cat hosts", "true"], "or a host with its slots. Received: line='# mine'"),
    (["-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "9", "3", "true"], "must not exceed the longest"),
    (["-np", "2", "--mpi-args=--tag-output", "true"], "horovodrun's --mpi-args. HINT: start with mpirun"),
    (["-np", "2", "--fusion-threshold-mb", "-1", "true"], "HVKERAS_BUCKET_SIZE must be readable"),
    (["-np", "2", "--log-level", "loud", "true"], "invalid choice: 'loud'"),
    (["-np", "3", "-H", "localhost:2", "true"], "1 host has 2. Received: np=3"),
    (["-np", "2", "-H", "a:x", "true"], "name:slots"),
    (["-H", "localhost", "-hostfile", "hosts", "true"], "leave out either -H or -hostfile"),
    (["-hostfile", "nowhere", "true"], "The hostfile must be readable (No such file or directory)"),
    (["-hostfile", "hosts", "true"], "line=2, text='node1 slots=many'"),
    (["-np", "1", "--output-filename", "hosts", "true"], "must be writable"),
])
def test_a_wrong_command_line_is_one_line_with_a_hint_and_code_2(arguments: list[str], complaint: str,
                                                                 tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# mine\nnode1 slots=many\n")
    done = run(arguments, tmp_path)
    assert done.returncode == 2
    message, *hint = done.stderr.splitlines()
    assert complaint in " ".join([message, *hint])
    assert all(line.startswith("HINT: ") for line in hint) and len(hint) < 2
    assert done.stdout == ""


@pytest.mark.parametrize(("flags", "variables"), [
    (["--fusion-threshold-mb", "64", "--log-level", "ERROR", "--timeline-filename", "t.json"],
     {"BUCKET_SIZE": "64MiB", "LOG_LEVEL": "ERROR", "TIMELINE": "t.json"}),
    (["--stall-check-warning-time-seconds", "5", "--stall-check-shutdown-time-seconds", "9.5"],
     {"STALL_WARNING": "5.0", "STALL_SHUTDOWN": "9.5"}),
    (["--no-stall-check", "--start-timeout", "7"],
     {"STALL_WARNING": "0", "STALL_SHUTDOWN": "0", "START_TIMEOUT": "7.0"}),
])
def test_flags_are_settings_of_the_ranks(flags: list[str], variables: dict[str, str], tmp_path: Path) -> None:
    shown = "print({name[8:]: text for name, text in os.environ.items() if name.startswith('HVKERAS_')"
    done = run(["-np", "1", *flags, *python(f"{shown} and name[8:] in {list(variables)}}})")], tmp_path)
    assert ast.literal_eval(done.stdout.removeprefix("[0] ")) == variables


def test_a_wrong_setting_is_found_before_anything_starts(tmp_path: Path) -> None:
    done = run(["-np", "2", *python("print('started')")], tmp_path, env={"HVKERAS_BUCKETSIZE": "1"})
    assert done.returncode == 2
    assert "did you mean HVKERAS_BUCKET_SIZE" in done.stderr
    assert done.stdout == ""


def test_a_hostfile_with_this_host_gives_its_slots(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2  # this one\n127.0.0.1:1\n")
    done = run(["-hostfile", "hosts", *python("print(os.environ['HVKERAS_RUN_LOCAL_SIZE'])")], tmp_path)
    assert sorted(done.stdout.splitlines()) == ["[0] 3", "[1] 3", "[2] 3"]


def test_two_dashes_end_the_flags(tmp_path: Path) -> None:
    assert run(["-np", "1", "--", *python("print('hello')")], tmp_path).stdout == "[0] hello\n"


def test_the_version_is_printed(tmp_path: Path) -> None:
    assert run(["-v"], tmp_path).stdout == f"hvkeras {hvkeras.__version__}\n"


def test_help_lists_every_flag_that_is_taken(tmp_path: Path) -> None:
    text = run(["--help"], tmp_path).stdout
    for flag in ("-np", "-H", "-hostfile", "-p ", "-i ", "--start-timeout", "--verbose", "--output-filename",
                 "-prefix-timestamp", "-cb", "--network-interfaces", "--backend", "--config-file", "--autotune"):
        assert flag in text
    assert "--mpi-args" not in text


def test_every_flag_of_horovodrun_is_taken_or_refused_with_a_reason() -> None:
    known = {option for action in parser()._actions for option in action.option_strings}
    for flag in HOROVODRUN_FLAGS.split():
        assert flag in known, flag


def test_check_build_says_in_each_row_what_works_and_what_is_missing(tmp_path: Path) -> None:
    for flag in ("-cb", "--check-build"):
        done = run([flag], tmp_path)
        assert done.returncode == 0
        rows = {line[:line.index("  ")]: line.split("  ", 1)[1].strip() for line in done.stdout.splitlines()
                if "  " in line and not line.startswith(" ")}
        assert set(rows) >= {"hvkeras run", "mpirun", "horovodrun --mpi", "horovodrun --gloo", "TF_CONFIG", "srun"}
        assert rows["hvkeras run"].startswith("native, horovod, tfdist")
        assert rows["python (one process)"].endswith("one process needs no engine")
        assert rows["tfdist"] == "yes          TensorFlow is installed"
        for launcher, package in (("Ray", "ray"), ("Spark", "pyspark")):
            if not find_spec(package):
                assert rows[launcher].startswith("none")
                assert rows[launcher].endswith(f"pip install 'hvkeras[{launcher.lower()}]'")
        assert "(1)" not in done.stdout
        assert not re.search(r" $", done.stdout, re.MULTILINE)
        assert rows["keras"] == metadata.version("keras")
        assert rows["Python"].startswith(sys.version.split()[0])


HOROVODRUN_FLAGS = """
--autotune --autotune-bayes-opt-max-samples --autotune-gaussian-process-noise --autotune-log-file
--autotune-steps-per-sample --autotune-warmup-samples --binding-args --blacklist-cooldown-range --cache-capacity
--config-file --cycle-time-ms --disable-cache --elastic-timeout --fusion-threshold-mb --gloo --gloo-timeout-seconds
--hierarchical-allgather --hierarchical-allreduce --host-discovery-script --jsrun --log-level --log-without-timestamp
--max-np --min-np --mpi --mpi-args --mpi-threads-disable --network-interface --network-interfaces
--no-hierarchical-allgather --no-hierarchical-allreduce --no-stall-check --no-torus-allreduce --num-nccl-streams
--output-filename --reset-limit --slots-per-host --stall-check-shutdown-time-seconds
--stall-check-warning-time-seconds --start-timeout --tcp --thread-affinity --timeline-filename
--timeline-mark-cycles --torus-allreduce --verbose -H --hosts -cb --check-build -h --help -hostfile --hostfile
-i --ssh-identity-file -np --num-proc -p --ssh-port -prefix-timestamp --prefix-output-with-timestamp -v --version
"""


@pytest.mark.parametrize(("script", "flags", "said"), [
    ("MultiWorkerMirroredStrategy", [], "repairs it, and start it with hvkeras run --tf-config"),
    ("MultiWorkerMirroredStrategy", ["--tf-config"], "which repairs it\n"),
    ("import hvkeras  # MultiWorkerMirroredStrategy", ["--tf-config"], "")])
def test_a_script_of_the_strategy_is_told_what_repairs_it(script: str, flags: list[str], said: str,
                                                          tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"# {script}\n" if "import" not in script else f"{script}\n")
    done = run(["-np", "1", *flags, sys.executable, "train.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("MultiWorkerMirroredStrategy fails in fit of Keras 3" in done.stderr) == bool(said)
    assert said in done.stderr


@pytest.mark.parametrize(("script", "flags", "said"), [
    ("MultiWorkerMirroredStrategy()", ["-np", "2"], True),
    ("MultiWorkerMirroredStrategy()", ["-np", "2", "--tf-config"], False),
    ("MultiWorkerMirroredStrategy()", ["-np", "1"], False),
    ("hvkeras.strategy('MultiWorkerMirroredStrategy')", ["-np", "2"], False),
    ("os.environ['TF_CONFIG'] = text; MultiWorkerMirroredStrategy()", ["-np", "2"], False)])
def test_a_strategy_without_tf_config_is_told_so_at_the_start(script: str, flags: list[str], said: bool,
                                                              tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"import hvkeras\n# {script}\n")
    done = run([*flags, sys.executable, "train.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert ("has one worker, and trains alone.\nHINT: start train.py with hvkeras run --tf-config"
            in done.stderr) == said


@pytest.mark.parametrize(("line", "refused"), [
    ("import horovod.tensorflow.keras as hvd", True),
    ("from horovod import tensorflow", True),
    ("from hvkeras.horovod import as_horovod\nimport horovod", False),
    ("try:\n    import horovod\nexcept ImportError:\n    pass", False),
    ("text = '''\nimport horovod\n'''", False)])
def test_a_half_converted_script_is_refused_where_horovod_is_not_installed(
        line: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (tmp_path / "train.py").write_text(f"import hvkeras\n{line}\n")
    flags = Namespace(prog="horovodrun", as_horovod=False, data_parallel=False)
    command = ["python", str(tmp_path / "train.py")]
    if not refused:
        _check_script(command, flags)
        return
    with pytest.raises(UsageError, match=r"import hvkeras alone.* add --as-horovod: horovodrun --as-horovod \.\.\."):
        _check_script(command, flags)


@pytest.mark.parametrize(("command", "warned"), [
    (["hvkeras", "exec", "--as-horovod", "a.py"], False),
    (["python", "-m", "hvkeras", "exec", "--as-horovod", "a.py"], False),
    (["python", "a.py", "--as-horovod"], True)])
def test_flags_of_hvkeras_after_hvkeras_are_intended(command: list[str], warned: bool,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    parse(["-np", "2", *command], "horovodrun")
    told = capsys.readouterr().err
    assert ("horovodrun: --as-horovod will be passed to the command" in told) == warned
    assert bool(told) == warned
