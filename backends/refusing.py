"""Backends of processes without ranks to communicate with: their collectives raise UsageError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from hvkeras.backends.interface import Backend, Reduction, Tensor
from hvkeras.backends.local import LocalBackend
from hvkeras.errors import UsageError, explain


class RefusingBackend(LocalBackend):
    """A backend whose collectives raise.

    Args:
        sentence: What must hold for a collective.
    """

    def __init__(self, sentence: str, hint: str) -> None:
        self._sentence, self._hint = sentence, hint

    def add_process_set(self, ranks: Sequence[int]) -> None:
        self._refuse("add_process_set")

    def remove_process_set(self, ranks: Sequence[int]) -> None:
        self._refuse("remove_process_set")

    def allreduce(
        self, tensors: Sequence[Tensor], key: str, reduction: Reduction, ranks: Sequence[int], before: float = 1.0,
        after: float = 1.0,
    ) -> list[Tensor]:
        self._refuse("allreduce")

    def allgather(self, tensor: Tensor, key: str, ranks: Sequence[int]) -> Tensor:
        self._refuse("allgather")

    def broadcast(self, tensor: Tensor, root_rank: int, key: str, ranks: Sequence[int]) -> Tensor:
        self._refuse("broadcast")

    def alltoall(self, tensor: Tensor, splits: Tensor, key: str, ranks: Sequence[int]) -> tuple[Tensor, Tensor]:
        self._refuse("alltoall")

    def reducescatter(
        self, tensor: Tensor, key: str, ranks: Sequence[int], before: float = 1.0, after: float = 1.0
    ) -> Tensor:
        self._refuse("reducescatter")

    def _refuse(self, operation: str) -> NoReturn:
        raise UsageError(explain(self._sentence, self._hint, operation=operation))


class StandbyBackend(RefusingBackend):
    """The backend of a worker that waits to join a running elastic job.

    The other ranks are in an elastic function, and call no collectives with this worker. Gradients are not averaged:
    scripts call `fit` on a batch to build the optimizer, and the weights are replaced when this worker joins.
    """

    name = "standby"
    has_ranks = False

    def __init__(self) -> None:
        super().__init__("Workers that join a running elastic job must call collectives in its elastic function, where"
                         " the other ranks are", "move the call into the function under hvd.elastic.run")

    def remove_process_set(self, ranks: Sequence[int]) -> None:
        pass

    @property
    def engine(self) -> str:
        return "joins a running job at its next commit"


class ForkedBackend(RefusingBackend):
    """The backend of a process that a rank has forked. It has a copy of the engine, but none of its threads.

    The other ranks would mistake its messages for those of the rank.

    Args:
        copied: The rank's backend, whose descriptions this one returns.
    """

    def __init__(self, copied: Backend) -> None:
        super().__init__("Collectives must be called in a rank's own process, not in one that it has forked",
                         "return the value to the rank, and call the collective there")
        self.name = copied.name  # type: ignore[misc]
        self._copied = copied  # its properties are read only on demand, as they may call a library

    @property
    def engine(self) -> str:
        return self._copied.engine

    @property
    def transport(self) -> str:
        return self._copied.transport
