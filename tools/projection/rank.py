"""A rank of the jobs that check projections: allreduces and training steps at one bandwidth after the other.

Started by `measure.py`; rank 0 writes what all have measured.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

import hvkeras as hvd
from hvkeras import compat
from hvkeras.backends.interface import Reduction
from hvkeras.bench.models import MODELS
from hvkeras.bench.ranks import Ranks
from hvkeras.job.session import current_session

PORT = 5999  # of the probe, in the namespace of rank 0's host
PINGS = 100
PING_BYTES = 64
TIMEOUT = 1200.0
RATE = 0.01  # of learning


def main() -> None:
    """Measures what the plan says."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    hvd.init(plan["backend"])
    ranks = Ranks(current_session(), TIMEOUT)
    actions: dict[str, Callable[[], float]] = {}
    for label, (size, links) in plan["sizes"].items():
        actions[f"allreduce {label}"] = allreduces(ranks, size, links)
    facts: dict[str, Any] = {"engine": ranks.job.backend.engine, "ranks": ranks.size, "models": {}}
    for name in plan["models"]:
        facts["models"][name], made = training(name, ranks.rank)
        actions.update(made)
    measured: dict[str, dict[str, list[float]]] = {}
    for _ in range(plan["rounds"]):
        for condition, (commands, bytes_to_send) in plan["conditions"].items():
            for command in commands if ranks.rank == 0 else ():
                subprocess.run(command, check=True, timeout=10)
            found = measured.setdefault(condition, {})
            for name, value in probe(ranks, plan["address"], bytes_to_send).items():
                found.setdefault(name, []).append(value)
            measure(ranks, actions, plan["repeats"], found)
    if ranks.rank == 0:
        Path(plan["results"]).write_text(json.dumps({**facts, "measured": measured}))
    hvd.shutdown()


def measure(ranks: Ranks, actions: Mapping[str, Callable[[], float]], repeats: int,
            found: dict[str, list[float]]) -> None:
    """Times each action, all ranks together; the slowest rank counts."""
    for name, action in actions.items():
        action()  # what the network's queues have saved up is spent
        for _ in range(repeats):
            ranks.gather(None)
            found.setdefault(name, []).append(max(ranks.gather(action())))


def allreduces(ranks: Ranks, size: int, links: int) -> Callable[[], float]:
    """Makes a chain of allreduces, verifies it, and gives what times one of them in seconds."""
    backend, everyone = ranks.job.backend, list(range(ranks.size))
    start = tf.fill([size // 4], float(ranks.rank + 1))

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]  # TensorFlow ships no types
    def chain(tensor: Any) -> Any:
        for link in range(links):
            tensor = backend.allreduce([tensor], f"measure {size} {link}", Reduction.SUM, everyone)[0] / ranks.size
        return tensor

    found = chain(start)
    tf.debugging.assert_near(found, tf.fill(start.shape, (ranks.size + 1) / 2))

    def once() -> float:
        began = time.perf_counter()
        chain(start).numpy()[:1]
        return (time.perf_counter() - began) / links

    return once


def training(name: str, rank: int) -> tuple[dict[str, Any], dict[str, Callable[[], float]]]:
    """Makes a model's step with and without communication, and gives what times each."""
    model = MODELS[name]
    built = model.build()
    variables = built.trainable_variables
    loss = _loss()
    batch = [tf.constant(each) for each in model.data(rank)]

    def step_with(wrap: Callable[[Any], Any]) -> Callable[[], float]:
        @tf.function(autograph=False)  # type: ignore[untyped-decorator]  # TensorFlow ships no types
        def step(samples: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                value = loss(labels, built(samples, training=True))
            gradients = wrap(tape).gradient(value, [variable.value for variable in variables])
            for variable, gradient in zip(variables, gradients, strict=True):
                variable.assign(variable - RATE * gradient)
            return value

        def once() -> float:
            began = time.perf_counter()
            step(*batch).numpy()
            return time.perf_counter() - began

        return once

    sizes = [int(tf.size(variable.value)) * 4 for variable in variables]
    return {"gradients": sizes, "samples": model.batch}, {
        f"step {name}": step_with(hvd.DistributedGradientTape), f"compute {name}": step_with(lambda tape: tape)}


def _loss() -> Callable[..., Any]:
    made: Callable[..., Any] = compat.default_keras().losses.SparseCategoricalCrossentropy(from_logits=True)
    return made


def probe(ranks: Ranks, address: str, size: int) -> dict[str, float]:
    """Measures the network between the first and the last rank's host without any engine.

    Returns:
        Half of a small message's way there and back, and bytes per second of a long one, over plain TCP; nothing
        where there is nothing to send.
    """
    if not size:
        return {}
    found: Sequence[float] = ()
    if ranks.rank == 0:
        with socket.create_server((address, PORT)) as server:
            ranks.gather("listening")
            server.settimeout(30)
            connection, _ = server.accept()
            with connection:
                _answer(connection, size)
        found = ranks.gather(None)[-1]
    else:
        ranks.gather("listening")
        last = ranks.rank == ranks.size - 1
        found = ranks.gather(_ask(address, size) if last else None)[-1]
    return {"latency": found[0], "bandwidth": found[1]}


def _answer(connection: socket.socket, size: int) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(PINGS):
        connection.sendall(connection.recv(PING_BYTES))
    room, got = bytearray(1 << 20), 0
    while got < size:
        got += connection.recv_into(room)
    connection.sendall(b"!")


def _ask(address: str, size: int) -> list[float]:
    with socket.create_connection((address, PORT), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(PINGS):
            began = time.perf_counter()
            connection.sendall(bytes(PING_BYTES))
            connection.recv(PING_BYTES)
            times.append(time.perf_counter() - began)
        began = time.perf_counter()
        connection.sendall(bytes(size))
        connection.recv(1)
        return [sorted(times)[PINGS // 2] / 2, size / (time.perf_counter() - began)]


if __name__ == "__main__":
    main()
