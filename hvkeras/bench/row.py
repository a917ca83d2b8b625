"""One row of a benchmark: what ran, and how long each of its blocks took, or why there is no result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

ONE_PROCESS, APART, MPI_ALONE = "one process", "apart", "MPI alone"
FORWARD_BACKWARD, UPDATE = "forward and backward", "update"  # the parts of a step
ENGINE, PEER, REFERENCE = "engine", "peer", "reference"
TCP_ALONE = "TCP alone"
KEPT_BY_THE_BENCHMARK = ("name", "blocks", "busy", "calls", "least")  # fields that ranks do not set

_PEERS = {"horovod": "horovod alone", "tfdist": "tf.distribute alone"}


def title_of(backend: str) -> str:
    """The name for using a backend's engine directly, without hvkeras; "" if that is not possible."""
    return _PEERS.get(backend, "")


@dataclass
class Row:
    """The result of one participant on one piece of work.

    Attributes:
        work: The size of the allreduce as the user wrote it, or the model.
        name: The participant: a backend, `one process`, or a library used without hvkeras.
        kind: `ENGINE`, `PEER` (a library used directly) or `REFERENCE` (a baseline for the others).
        engine: A description of what moves the bytes.
        reason: Why there is no result, or "".
        wrong: Whether the reason is that a result was wrong.
        blocks: Seconds of one allreduce or one training step, block by block: each the mean over `calls` calls
            and `links` links, and over the ranks.
        busy: Seconds of the processor that all ranks together took for the same, block by block.
        calls: The number of calls timed in each block.
        links: The number of allreduces in a call that depend on each other; 1 for a step.
        bytes: Bytes of the tensor, or of all gradients.
        samples: Samples of all ranks in a step; 0 for an allreduce.
        memory: By how many bytes the peak resident memory rose while the engine started, was traced and ran its
            first calls, on the rank where it rose most; None if unknown.
        difference: The distance of the weights from those that one process computes, as a fraction of the distance
            they moved; None if nothing was compared.
        rounding: The distance that the weights change, in the same measure, when only the last bits of the initial
            weights change: how strongly training this model amplifies rounding.
        least: Seconds that an allreduce takes at least at the bandwidth of the hosts' cables; 0 if there is none.
        first: Seconds of the first step, in which it is traced and compiled; None for an allreduce.
        parts: Seconds of a part of a step that runs alone, block by block, as in `blocks`: `FORWARD_BACKWARD`, and
            `UPDATE` with gradients that are there already. Empty for an allreduce, and where a step has no parts.
    """

    work: str
    name: str
    kind: str = ENGINE
    engine: str = ""
    reason: str = ""
    wrong: bool = False
    blocks: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    calls: int = 0
    links: int = 1
    bytes: int = 0
    samples: int = 0
    memory: int | None = None
    difference: float | None = None
    rounding: float | None = None
    least: float = 0.0
    first: float | None = None
    parts: dict[str, list[float]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The row as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        """Reads the output of `to_json`, ignoring unknown fields."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})
