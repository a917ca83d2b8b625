"""The GPUs of a rank, by the addresses that Spark gives to its task."""

from __future__ import annotations

import pytest

from hvkeras.errors import UsageError
from hvkeras.host.gpus import VISIBLE
from hvkeras.spark.order import Gpus
from hvkeras.spark.task import visible_devices

GIVEN = {"gpu": ["2", "3"]}


@pytest.mark.parametrize(("gpus", "given", "environ", "devices"), [
    (Gpus(), {}, {}, None),
    (Gpus(), {}, {VISIBLE: "1"}, None),
    (Gpus(), GIVEN, {}, "2,3"),
    (Gpus(), GIVEN, {VISIBLE: "4, 5,GPU-6,7"}, "GPU-6,7"),
    (Gpus(counts=[1, 2]), GIVEN, {}, "2"),
    (Gpus(hidden=True), GIVEN, {}, ""),
    (Gpus("card", [1]), {"card": ["0"]}, {}, "0"),
])
def test_devices_are_those_of_the_task(gpus, given, environ, devices):
    assert visible_devices(gpus, 0, given, environ) == devices


@pytest.mark.parametrize(("gpus", "environ", "words"), [
    (Gpus(counts=[3]), {}, "as many GPUs to each task as its rank uses, 3 to this one"),
    (Gpus("card", [1]), {}, "spark.task.resource.card.amount"),
    (Gpus(), {VISIBLE: "0,1"}, "must be indices of the entries of CUDA_VISIBLE_DEVICES"),
])
def test_gpus_that_are_not_there_are_told(gpus, environ, words):
    with pytest.raises(UsageError, match=words):
        visible_devices(gpus, 0, GIVEN, environ)
