"""Messages on the wire: what is sent arrives, in few bytes."""

from __future__ import annotations

import dataclasses

import pytest

from hvkeras.control import messages
from hvkeras.control.cause import Cause, CauseKind
from hvkeras.control.messages import (
    Deadlines,
    Failed,
    Heartbeat,
    JobEnded,
    Locate,
    Message,
    Participate,
    Relayed,
    Standstill,
    decode,
    encode,
)

CAUSE = Cause(CauseKind.STALLED, 1, "host1", 42, "has made no progress", "Traceback ...", 3)
ALL = [each for each in vars(messages).values()
       if isinstance(each, type) and issubclass(each, Message) and each is not Message]


@pytest.mark.parametrize("message", [
    Heartbeat(), Heartbeat({"k": 3}, {"k": "train.py:7"}, {}, ["facts"],
                           Standstill(20.0, 3.0, "train step 1", "train", True, False)),
    Relayed([[0, 2, 5, 5], []], [encode(Heartbeat()), encode(Locate("two\nlines"))]), Relayed([], []),
    Failed(CAUSE), Failed(CAUSE, secondary=True), JobEnded(CAUSE), Deadlines(), Deadlines(liveness=3.0), Locate(),
    Locate(""), Participate("k", {"label": "x"}, [{"operation": "allreduce"}], 2, True)],
    ids=lambda message: type(message).__name__)
def test_what_is_sent_arrives(message: Message) -> None:
    assert decode(encode(message)) == message


def test_only_what_differs_from_the_defaults_travels() -> None:
    assert encode(Heartbeat()) == b'["Heartbeat",{}]'
    assert encode(Heartbeat(counts={"k": 3})) == b'["Heartbeat",{"counts":{"k":3}}]'
    assert encode(Locate("")) == b'["Locate",{"stall":""}]'


def test_messages_are_facts() -> None:
    assert len(ALL) > 40
    for message in ALL:
        assert dataclasses.is_dataclass(message) and message.__dataclass_params__.frozen, message  # type: ignore[attr-defined]


@pytest.mark.parametrize("data", [b'["Message7",{}]', b'["Cause",{}]', b'["json",{}]', b"[]", b"x"])
def test_anything_else_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"not a message of hvkeras|unpack|Expecting value"):
        decode(data)


def test_the_middle_of_what_is_too_long_does_not_travel() -> None:
    found = decode(encode(Failed(Cause(CauseKind.EXCEPTION, 0, "h", 1, "x" * 1_000_000, "y" * 1_000_000 + "the end"))))
    assert isinstance(found, Failed)
    assert len(found.cause.error) < 20_000
    assert len(found.cause.traceback) < 100_000
    assert found.cause.traceback.endswith("the end")


@pytest.mark.parametrize("kind", CauseKind)
def test_each_kind_of_cause_has_its_properties(kind: CauseKind) -> None:
    assert Cause.from_message(dataclasses.replace(CAUSE, kind=kind).to_message()).kind is kind
    of_all = {CauseKind.MISMATCH, CauseKind.TIMEOUT, CauseKind.LEFT, CauseKind.SETUP}
    assert kind.leaves_others_intact is (kind not in of_all)
    assert kind.may_pass is (kind is not CauseKind.SETUP)
