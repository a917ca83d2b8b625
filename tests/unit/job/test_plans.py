"""Plans and their counts, in one process."""

from __future__ import annotations

import pickle
import threading
import time
from pathlib import Path

import pytest
import tensorflow as tf

from hvkeras import ArgumentError, DuplicateNameError, MismatchError, UsageError
from hvkeras.job.plans import EntryCounts, Plan


def plan(name: str) -> Plan:
    return Plan.of("allreduce", [tf.ones([2])], (0, 1), f'allreduce "{name}"', identity=name, how="sum")


def test_a_plan_is_entered_by_one_thread_at_a_time_in_eager_mode() -> None:
    counts = EntryCounts()
    with counts.entering(plan("a"), []):
        with counts.entering(plan("b"), []):
            pass
        with pytest.raises(DuplicateNameError) as raised, counts.entering(plan("a"), []):
            pass
        assert "must have different names. Received: collective='allreduce \"a\"'." in str(raised.value)
    with counts.entering(plan("a"), []):
        pass
    assert {seen.identity: count for count, seen in counts.snapshot().values()} == {"a": 2, "b": 1}


def test_what_no_graph_enters_and_nobody_is_in_is_forgotten() -> None:
    counts = EntryCounts()
    for name in "aabc":
        with counts.entering(plan(name), []):
            pass

    @tf.function
    def in_a_graph() -> None:
        with counts.entering(plan("b"), []):
            tf.no_op()

    in_a_graph()
    keys = {name: plan(name).key for name in "abcd"}
    with counts.entering(plan("d"), []):
        asked = {keys["a"]: 2, keys["b"]: 2, keys["c"]: 3, keys["d"]: 1}
        assert counts.forget(asked) == [keys["a"]]
    assert keys["a"] not in counts.snapshot() and keys["a"] not in counts.calls() and counts.site(keys["a"]) == ""
    with counts.entering(plan("a"), []):
        pass
    assert counts.snapshot()[keys["a"]][0] == 1
    assert counts.forget({"never entered": 0}) == ["never entered"]


def test_a_thread_that_participates_for_others_is_waited_for() -> None:
    counts, order = EntryCounts(), []
    over = threading.Event()

    def take_part() -> None:
        time.sleep(0.1)
        with counts.entering(plan("a")):
            over.wait(10)
            order.append("for others")

    thread = threading.Thread(target=take_part)
    counts.set_outstanding([plan("a").key])
    thread.start()
    threading.Timer(0.4, over.set).start()
    with counts.entering(plan("a"), []):
        order.append("own")
    thread.join(10)
    assert order == ["for others", "own"]


@pytest.mark.parametrize(("kind", "of_tensorflow"), [(DuplicateNameError, tf.errors.InvalidArgumentError),
                                                     (MismatchError, tf.errors.FailedPreconditionError)])
def test_errors_are_tensorflows_and_can_be_sent(kind: type[tf.errors.OpError], of_tensorflow: type[Exception]) -> None:
    error = pickle.loads(pickle.dumps(kind("in words")))
    assert type(error) is kind
    assert isinstance(error, of_tensorflow)
    assert str(error) == "in words"


def test_an_argument_error_is_a_usage_error_and_tensorflows() -> None:
    error = pickle.loads(pickle.dumps(ArgumentError("in words")))
    assert isinstance(error, UsageError)
    assert isinstance(error, tf.errors.InvalidArgumentError)
    assert str(error) == "in words"


def test_a_plan_knows_where_the_user_entered_it_last() -> None:
    counts = EntryCounts()

    def enter() -> None:
        with counts.entering(plan("a"), []):
            pass

    first = enter.__code__.co_firstlineno
    assert counts.site(plan("a").key) == ""
    enter()
    assert counts.site(plan("a").key).endswith(f"test_plans.py:{first + 1} in enter")
    with counts.entering(plan("a")):  # as a thread does that takes part for others
        pass
    assert f":{first + 1} in enter" in counts.site(plan("a").key)


def test_a_traced_plan_knows_the_line_that_the_user_wrote() -> None:
    counts = EntryCounts()

    @tf.function
    def step(flag: tf.Tensor) -> tf.Tensor:
        if flag:  # AutoGraph makes another function of it
            with counts.entering(plan("a"), []):
                flag = tf.identity(flag)
        return flag

    step(tf.constant(True))
    path, number = counts.site(plan("a").key).removesuffix(" in step").split(":")
    assert path.endswith("test_plans.py")
    assert "with counts.entering(" in Path(__file__).read_text().splitlines()[int(number) - 1]
