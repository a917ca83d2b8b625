"""Backends of estimators: `SparkBackend` starts the ranks in tasks of the Spark session."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from hvkeras.spark.functions import run
from hvkeras.spark.session import active_context

ResultT = TypeVar("ResultT")


class Backend(abc.ABC):
    """Base class of estimator backends, which run functions on ranks."""

    @abc.abstractmethod
    def run(self, fn: Callable[..., ResultT], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
            env: Mapping[str, str] | None = None) -> list[ResultT]:
        """Run a function on all ranks.

        Args:
            fn: The function.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            env: Additional environment variables of the ranks.

        Returns:
            The results, in rank order.
        """

    @abc.abstractmethod
    def num_processes(self) -> int:
        """Return the number of ranks."""


class SparkBackend(Backend):
    """Backend whose ranks run in the tasks of a Spark job.

    Example:
        estimator = KerasEstimator(backend=SparkBackend(num_proc=4, start_timeout=300), ...)

    Args:
        num_proc: The number of ranks; by default, Spark's default parallelism.
        env: Additional environment variables of the ranks.
        **kwargs: Additional arguments of `hvkeras.spark.run`.
    """

    def __init__(self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        self._num_proc, self._env, self._kwargs = num_proc, dict(env or {}), kwargs

    def run(self, fn: Callable[..., ResultT], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
            env: Mapping[str, str] | None = None) -> list[ResultT]:
        """Run a function on all ranks; see `Backend.run`."""
        return run(fn, args, kwargs, num_proc=self.num_processes(), env={**self._env, **(env or {})}, **self._kwargs)

    def num_processes(self) -> int:
        """Return the number of ranks."""
        return int(active_context().defaultParallelism) if self._num_proc is None else self._num_proc
