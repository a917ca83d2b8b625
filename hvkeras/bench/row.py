"""One line of a benchmark: what ran, how long each of its blocks took, or why there is no figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

ONE_PROCESS, APART, MPI_ALONE = "one process", "apart", "MPI alone"
ENGINE, PEER, REFERENCE = "engine", "peer", "reference"

_ALONE = {"horovod": "horovod alone", "tfdist": "tf.distribute alone"}


def title_of(backend: str) -> str:
    """What using a backend's engine directly, without hvkeras, is called; "" where that is not possible."""
    return _ALONE.get(backend, "")


@dataclass
class Row:
    """What one participant did on one piece of work.

    Attributes:
        work: The size of the allreduce as the user wrote it, or the model.
        name: Who did it: a backend, `one process`, or a library used without hvkeras.
        kind: `ENGINE`, `PEER` (a library used directly) or `REFERENCE` (what the others are measured by).
        engine: What moves the bytes, in words.
        reason: Why there are no figures, or "".
        wrong: Whether the reason is that a result was wrong.
        blocks: Seconds of one allreduce or one training step, block by block: each the mean over `calls` calls
            and `links` links, and over the ranks.
        calls: How many calls each block timed.
        links: How many allreduces depend on each other in a call; 1 for a step.
        bytes: Bytes of the tensor, or of all gradients.
        samples: Samples of all ranks in a step; 0 for an allreduce.
        memory: By how many bytes the peak of resident memory rose while this one started, traced and took its
            first calls, on the rank where it rose most; None where that cannot be told.
        difference: How far the weights were from those that one process computes, as a share of how far they
            had moved; None where nothing was compared.
        rounding: How far a change of the start's last bits carries the weights in the same measure: what training
            this model makes of rounding.
    """

    work: str
    name: str
    kind: str = ENGINE
    engine: str = ""
    reason: str = ""
    wrong: bool = False
    blocks: list[float] = field(default_factory=list)
    calls: int = 0
    links: int = 1
    bytes: int = 0
    samples: int = 0
    memory: int | None = None
    difference: float | None = None
    rounding: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The row as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        """Reads what `to_json` wrote, leaving out what it does not know."""
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in data.items() if name in known})
