"""Fixtures of all tests: jobs of several ranks (see `harness`), and guards against leaks."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import LaunchError, Outcome, costs, failure_report, launchers, leaks, schedule, start_job, warm
from harness.checks import WANTED
from harness.job import recent

# Shells start background jobs with SIGINT ignored, and nohup ignores SIGHUP. All processes of the tests would inherit
# that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


costs.watch()

_SEGMENTS = pytest.StashKey[set[str]]()
_GROUP = pytest.StashKey[str]()  # of the running test
_WARM = pytest.StashKey[warm.Session]()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the fork servers of warm ranks."""
    if _WARM in config.stash:
        config.stash[_WARM].end()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of these tests."""
    group = parser.getgroup("hvkeras")
    group.addoption("--cold", action="store_true", help="start every rank as a new Python process (see harness.warm)")
    group.addoption("--preload", metavar="MODULES", help="start every rank of hvkeras run with --preload MODULES"
                    " (implies --cold): each test must have the same outcome")
    group.addoption("--horovod", metavar="FILE", help="file that the build of Horovod creates: tests that need Horovod"
                    " wait for it, and fail if FILE.failed exists")
    group.addoption("--write-times", action="store_true", help="record the duration of tests, which determines their"
                    " order (tests/harness/times.json), and print the CPU time by activity")


def pytest_configure(config: pytest.Config) -> None:
    """Apply the options."""
    warm.switched_off = config.getoption("cold") or bool(config.getoption("preload"))
    if config.getoption("preload"):
        os.environ[launchers.PRELOAD] = config.getoption("preload")
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.stash[_WARM] = warm.Session()
        config.pluginmanager.register(failure_report.FailureReport(config.getoption("write_times")))
        if config.getoption("write_times"):
            config.pluginmanager.register(costs.Session(config.getoption("numprocesses", None) or 1))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, None, None]:
    """Sort the groups of tests, and add marks before pytest deselects by mark."""
    schedule.arrange(items)
    yield
    if "PYTEST_XDIST_WORKER" in os.environ:
        schedule.write_groups(items, Path(os.environ[warm.FOLDER]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run each group on one worker."""
    return schedule.GroupScheduling(config, log, Path(os.environ[warm.FOLDER]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Store the test's group and, if the test needs Horovod, wait for its build."""
    item.config.stash[_GROUP] = schedule.group_of(item) if isinstance(item, pytest.Function) else item.nodeid
    if (built := item.config.getoption("horovod")) and not item.get_closest_marker("early"):
        schedule.wait_for_horovod(Path(built))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Add the test's group to each report, and the failing rank's log to that of a failed test."""
    report = yield
    if report.failed and call.excinfo is not None:
        report.sections.append((failure_report.LOG, failure_report.log_of(item, call.excinfo.value)))
    report.group = schedule.group_of(item) if isinstance(item, pytest.Function) else item.nodeid
    return report


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude imported modules from garbage collection, which Keras's `clear_session` runs."""
    gc.collect()
    gc.freeze()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Store the content of /dev/shm before the first test."""
    session.config.stash[_SEGMENTS] = leaks.shared_memory()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session of several workers that leaves shared memory; without workers, each test is checked."""
    if "PYTEST_XDIST_WORKER" in os.environ or not session.config.getoption("numprocesses", None):
        return
    before = session.config.stash[_SEGMENTS]
    left = {name for name in leaks.left_after_grace(leaks.shared_memory, before) if not leaks.is_foreign(name)}
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nthe tests left shared memory in /dev/shm: {sorted(left)}")


@pytest.fixture
def launch(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Outcome]:
    """Run a job to its end: `launch(launcher, script, arguments, np=2, ...)`; arguments as in `harness.start_job`."""
    return _launcher(tmp_path_factory.mktemp("jobs"))


@pytest.fixture(scope="session")
def launch_once(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[..., Outcome]:
    """Like `launch`, but a job with the same arguments runs once per session. Its failure fails all its tests.

    The job only runs the checks whose results the session's tests read.
    """
    run = _launcher(tmp_path_factory.mktemp("shared-jobs"))
    done: dict[str, Outcome | LaunchError] = {}

    def once(launcher: str, script: Path, *args: Any, **kwargs: Any) -> Outcome:
        wanted = schedule.wanted_checks(script, request.config.stash[_GROUP], request.session.items)
        kwargs["env"] = {**kwargs.get("env", {}), **({WANTED: " ".join(wanted)} if wanted else {})}
        key = repr((launcher, script, args, sorted(kwargs.items())))
        if key not in done:
            try:
                done[key] = run(launcher, script, *args, **kwargs)
            except LaunchError as error:
                done[key] = error
        outcome = done[key]
        if isinstance(outcome, LaunchError):
            raise outcome
        return outcome

    return once


def _launcher(folder: Path) -> Callable[..., Outcome]:
    def run(launcher: str, script: Path, arguments: tuple[str, ...] = (), **options: Any) -> Outcome:
        with start_job(launcher, script, arguments, folder=folder, **options) as job:
            outcome = job.wait()
        if outcome.orphans:
            raise LaunchError(f"the job left processes behind: {outcome.orphans}\n{outcome.report()}")
        return outcome

    return run


@pytest.fixture(autouse=True)
def no_earlier_jobs() -> None:
    """Forget the jobs of earlier tests, so that a failed test shows its own jobs' logs."""
    recent.clear()


@pytest.fixture(autouse=True)
def no_leaked_environment() -> Iterator[None]:
    """Fail a test that changes the environment, and restore it."""
    before = leaks.environment()
    yield
    after = leaks.environment()
    changed = {name: (before.get(name), after.get(name)) for name in before.keys() | after.keys()
               if before.get(name) != after.get(name)}
    for name, (old, _) in changed.items():
        if old is None:
            del os.environ[name]
        else:
            os.environ[name] = old
    assert not changed, f"the test changed environment variables (before, after): {changed}"


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """Fail a test that leaves threads running."""
    before = leaks.threads()
    yield
    left = leaks.left_after_grace(leaks.threads, before)
    assert not left, f"the test left threads running: {sorted(thread.name for thread in left)}"


@pytest.fixture(autouse=True)
def no_leaked_processes() -> Iterator[None]:
    """Fail a test that leaves child processes running."""
    before = leaks.children()
    yield
    left = leaks.left_after_grace(leaks.children, before)
    for process in left:
        process.kill()
    assert not left, f"the test left child processes running: {left}"


@pytest.fixture(autouse=True)
def no_leaked_files() -> Iterator[None]:
    """Fail a test that leaves files in the current folder or shared memory in /dev/shm."""
    folder, files, segments = os.getcwd(), leaks.files(), leaks.shared_memory()
    yield
    assert os.getcwd() == folder, f"the test changed the current folder to {os.getcwd()}"
    left = leaks.files() - files
    assert not left, f"the test left files in {folder}: {sorted(left)}"
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # concurrent tests have segments, too; see pytest_sessionfinish
    ours = {name for name in leaks.left_after_grace(leaks.shared_memory, segments) if not leaks.is_foreign(name)}
    assert not ours, f"the test left shared memory in /dev/shm: {sorted(ours)}"


@pytest.fixture(autouse=True)
def no_leaked_job() -> Iterator[None]:
    """Fail a test that calls `init()` in this process without `shutdown()`."""
    yield
    startup = sys.modules.get("hvkeras.startup")
    if startup is not None and startup.is_initialized():
        startup.shutdown()
        pytest.fail("the test left hvkeras initialized")
