"""Backend for a single process: every collective is the identity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvkeras.backends.capabilities import CompiledByXla
from hvkeras.backends.interface import Availability, Reduction, Start, Tensor

if TYPE_CHECKING:
    from hvkeras.control.launch_environments import Launch


class LocalBackend(CompiledByXla):
    """A backend without an engine: the size is 1, and every collective returns its input."""

    name = "local"
    outlives_errors_in_graphs = True
    starts_after_failure = True
    objection_to_sessions = ""

    @classmethod
    def availability(cls) -> Availability:
        return Availability(True, "needs nothing; serves one process")

    @classmethod
    def objection(cls, launch: Launch, several_hosts: bool) -> str:
        if launch.size > 1:
            return f"local serves one process and {launch.launcher} started {launch.size}; use tfdist or horovod"
        return ""

    @classmethod
    def preference(cls, launch: Launch, has_gpu: bool) -> None:
        return None

    @classmethod
    def built_with(cls) -> frozenset[str]:
        return frozenset()

    def start(self, start: Start) -> int:
        return 1

    def stop(self) -> None:
        pass

    def abort(self, reason: str) -> None:
        pass

    def is_peer_failure(self, error: BaseException) -> bool:
        return False

    @property
    def engine(self) -> str:
        return "no communication"

    @property
    def transport(self) -> str:
        return "none"

    @property
    def objection_to_xla(self) -> str:
        return ""

    def enter(self, key: str) -> None:
        pass

    def entered(self, key: str) -> int:
        return 0

    def add_process_set(self, ranks: Sequence[int]) -> None:
        pass

    def remove_process_set(self, ranks: Sequence[int]) -> None:
        pass

    def allreduce(
        self, tensors: Sequence[Tensor], key: str, reduction: Reduction, ranks: Sequence[int], before: float = 1.0,
        after: float = 1.0,
    ) -> list[Tensor]:
        return list(tensors)

    def allgather(self, tensor: Tensor, key: str, ranks: Sequence[int]) -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor, root_rank: int, key: str, ranks: Sequence[int]) -> Tensor:
        return tensor

    def alltoall(self, tensor: Tensor, splits: Tensor, key: str, ranks: Sequence[int]) -> tuple[Tensor, Tensor]:
        return tensor, splits

    def reducescatter(
        self, tensor: Tensor, key: str, ranks: Sequence[int], before: float = 1.0, after: float = 1.0
    ) -> Tensor:
        return tensor
