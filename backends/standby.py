"""The backend of a worker that waits to join a running elastic job: it has no ranks to communicate with yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from hvkeras.backends.interface import Reduction, Tensor
from hvkeras.backends.local import LocalBackend
from hvkeras.errors import UsageError, explain


class StandbyBackend(LocalBackend):
    """A backend whose collectives raise: the other ranks are in an elastic function, and call none with this one.

    Gradients stay as they are: scripts call `fit` on a batch to build the optimizer, and the weights are replaced when
    this worker joins.
    """

    name = "standby"
    has_ranks = False

    @property
    def engine(self) -> str:
        return "joins a running job at its next commit"

    def add_process_set(self, ranks: Sequence[int]) -> None:
        _refuse("add_process_set")

    def allreduce(
        self, tensors: Sequence[Tensor], key: str, reduction: Reduction, ranks: Sequence[int], before: float = 1.0,
        after: float = 1.0,
    ) -> list[Tensor]:
        _refuse("allreduce")

    def allgather(self, tensor: Tensor, key: str, ranks: Sequence[int]) -> Tensor:
        _refuse("allgather")

    def broadcast(self, tensor: Tensor, root_rank: int, key: str, ranks: Sequence[int]) -> Tensor:
        _refuse("broadcast")

    def alltoall(self, tensor: Tensor, splits: Tensor, key: str, ranks: Sequence[int]) -> tuple[Tensor, Tensor]:
        _refuse("alltoall")

    def reducescatter(
        self, tensor: Tensor, key: str, ranks: Sequence[int], before: float = 1.0, after: float = 1.0
    ) -> Tensor:
        _refuse("reducescatter")


def _refuse(operation: str) -> NoReturn:
    raise UsageError(explain("Workers that join a running elastic job must call collectives in its elastic function,"
                             " where the other ranks are", "move the call into the function under hvd.elastic.run",
                             operation=operation))
