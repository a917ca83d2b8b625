"""Pipelines that shuffle, built again so that all ranks shuffle alike: `dataset.shuffle(1000).map(f).batch(32)`.

A shuffle without a seed has another order on each rank, so ranks cannot take different rows of the same batches. The
stages from the shuffle on are therefore applied again, with seeds that all ranks share. This is done only if it is
provably the same pipeline otherwise: all of these stages are known, and the functions that select elements draw no
random numbers. Functions are not traced again, as variables of their closures may have changed: those that were traced
are called.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvkeras.compat.graphs import operations_of, traced, unconverted
from hvkeras.data.accounts import keeps_accounts
from hvkeras.data.consistency import exchange, require_equal
from hvkeras.data.pipeline import DRAWING, inputs, is_batched, shuffle_seeds, stage_name, stages
from hvkeras.errors import UsageError, explain
from hvkeras.job.process_sets import ProcessSet

Seeds = tuple[Any, Any]  # as in TensorFlow's operations: ints or int64 tensors

FIX = ("shard first and shuffle after it, hvd.shard(dataset, shuffle=1000).batch(32), or give shuffle() the same seed"
       " on every rank, after the same tf.random.set_seed or keras.utils.set_random_seed")
SAME_ORDER = "A dataset that all ranks share must be read in the same order on all ranks"


def shuffled_alike(dataset: Any, seed: int, process_set: ProcessSet) -> Any:
    """Return a dataset whose shuffles have the same seeds on all ranks: those of the first rank, or new ones.

    Parallel interleaving in no fixed order is replaced by that in order.

    In an elastic job, ranks that join later cannot ask the others. There, the seeds derive from `seed`.

    Raises:
        UsageError: It cannot be proven that the order is the same then, or ranks have different numbers of shuffles.
    """
    seeds = shuffle_seeds(dataset)
    if keeps_accounts():
        if not seeds:
            return dataset
        try:
            return reseeded(dataset, seeds_of_pass(dataset, seed))
        except UsageError:
            if (0, 0) in seeds:
                raise
            return dataset
    drawn = [found if found != (0, 0) else (_draw(), _draw()) for found in seeds]
    everyone = exchange("seeds of shuffles", lambda: (seeds, drawn), process_set)
    require_equal("All ranks must read the same data in the same order", FIX,
                  [f"{len(found)} shuffles" for found, _ in everyone], process_set.ranks)
    if (0, 0) not in everyone[0][0] and all(found == everyone[0][0] for found, _ in everyone):
        with contextlib.suppress(UsageError):
            return reseeded(dataset, {})
        return dataset
    built: list[Any] = []

    def build() -> None:
        pairs = zip((stage for stage in stages(dataset) if is_seeded(stage)), everyone[0][1], strict=True)
        built.append(reseeded(dataset, {id(stage): pair for stage, pair in pairs}))

    exchange("common order", build, process_set)
    return built[0]


def _draw() -> int:
    return 1 + int.from_bytes(os.urandom(4), "little") % (2**31 - 2)


def is_seeded(stage: Any) -> bool:
    """Return whether a stage shuffles or draws."""
    return hasattr(stage, "_seed") and hasattr(stage, "_seed2")


def seeds_of_pass(dataset: Any, seed: int, of_pass: Any = None) -> dict[int, Seeds]:
    """Return seeds for the stages that shuffle, by their identity.

    Args:
        seed: The seed of all passes.
        of_pass: The seed of this pass, for stages that shuffle differently in each one; by default, `seed`.
    """
    found = [stage for stage in stages(dataset) if is_seeded(stage)]
    return {id(stage): (seed if of_pass is None or not getattr(stage, "_reshuffle_each_iteration", True) else of_pass,
                        number) for number, stage in enumerate(found, 1)}


_OF_UNKNOWN_ORDER = "ParallelInterleave"  # does not store whether it was given deterministic=False


def reseeded(dataset: Any, seeds: Mapping[int, Seeds]) -> Any:
    """Return a dataset with other seeds, whose parallel stages keep the order.

    Args:
        seeds: The seeds of stages, by their identity.

    Raises:
        UsageError: It is unknown how to apply a stage again, or whether all ranks would read the same elements.
    """
    _require_same_elements(dataset)
    built: dict[int, Any] = {}

    def build(stage: Any) -> Any:
        if id(stage) not in built:
            sources = inputs(stage)
            others = [build(source) for source in sources]
            is_changed = (id(stage) in seeds or stage_name(stage) == _OF_UNKNOWN_ORDER
                          or any(one is not other for one, other in zip(sources, others, strict=True)))
            built[id(stage)] = again(stage, others) if is_changed else stage
        return built[id(stage)]

    def again(stage: Any, sources: Sequence[Any]) -> Any:
        if id(stage) in seeds and stage_name(stage) in _SEEDED:
            return _SEEDED[stage_name(stage)](stage, sources, seeds[id(stage)])
        apply = AGAIN.get(stage_name(stage))
        found = None if apply is None else apply(stage, *sources)
        if found is None or found.element_spec != stage.element_spec:
            raise UsageError(explain(
                f"{SAME_ORDER}, but shuffle() gives each rank its own, and hvkeras knows the stage after it too little"
                " to share a seed", lines_to_write(dataset), stage=_call(stage)))
        return found

    return build(dataset)


# Stages whose functions decide which elements there are.
_SELECTING = {"Filter", "FlatMap", "Interleave", "ParallelInterleave", "TakeWhile", "GroupByWindow", "Scan"}
_MAYBE_RANDOM = DRAWING | {"PyFunc", "EagerPyFunc", "PyFuncStateless", "RngReadAndSkip"}


def _require_same_elements(dataset: Any) -> None:
    """Check that no results of a map that may be random decide which elements a dataset has.

    Raises:
        UsageError: They may.
    """
    for stage in stages(dataset):
        for source in stages(stage)[1:] if stage_name(stage) in _SELECTING else ():
            if stage_name(source) in ("Map", "ParallelMap") and {
                    node.op for nodes in operations_of(source._map_func) for node in nodes} & _MAYBE_RANDOM:
                raise UsageError(explain(
                    f"All ranks must read the same elements, but the results of {_call(source)} may be random, and"
                    f" {_call(stage)} selects elements after it", f"write {_call(stage)} before {_call(source)}, or"
                    " give each shuffle() the same seed on every rank, if random results do not decide which elements"
                    " there are", stage=_call(stage)))


def seeds_of_selection(dataset: Any) -> list[tuple[int, int]]:
    """Return the seeds with which functions decide which elements there are.

    Raises:
        UsageError: One draws random numbers or shuffles without a seed, so that ranks read different elements.
    """
    found = []
    for stage in stages(dataset):
        for function in stage._functions() if stage_name(stage) in _SELECTING else ():
            found += seeds_in(function)
        if (0, 0) in found:
            raise UsageError(explain("All ranks must read the same elements, but a function that selects them draws"
                                     " random numbers, or shuffles, without a seed", "give it the same seed on every"
                                     f" rank, or call hvd.shard(dataset) before {_call(stage)}", stage=_call(stage)))
    return found


def seeds_in(function: Any) -> list[tuple[int, int]]:
    """Return the seeds of operations that draw random numbers or shuffle; -1 for one that is computed.

    Args:
        function: The `StructuredFunctionWrapper` of a stage.
    """
    return [seeds for nodes in operations_of(function) for seeds in _seeds_in(nodes)]


def _seeds_in(nodes: Sequence[Any]) -> Iterator[tuple[int, int]]:
    by_name = {node.name: node for node in nodes}

    def value(name: str) -> int:
        node = by_name.get(name.partition(":")[0])
        if node is None:
            return -1
        if node.op == "SelectV2":  # the second seed, unless both are 0
            return value(node.input[2])
        return int(tf.make_ndarray(node.attr["value"].tensor)) if node.op == "Const" else -1

    for node in nodes:
        if node.op in DRAWING:
            yield int(node.attr["seed"].i), int(node.attr["seed2"].i)
        elif node.op.startswith("ShuffleDataset"):
            yield value(node.input[2]), value(node.input[3])
        elif node.op.startswith("RandomDataset"):
            yield value(node.input[0]), value(node.input[1])


def lines_to_write(dataset: Any) -> str:
    """Return the lines by which all ranks read the same samples, for a hint."""
    shuffles = [stage for stage in stages(dataset) if stage_name(stage) == "Shuffle"]
    calls: list[str] = []
    stage = dataset
    while stage not in shuffles and len(inputs(stage)) == 1:
        calls.insert(0, _call(stage))
        stage = inputs(stage)[0]
    seeded = " and ".join(f"shuffle({int(one._buffer_size)}, seed={number})"
                          for number, one in enumerate(reversed(shuffles), 1))
    if not shuffles:
        return FIX
    with_seed = f"write {seeded} on every rank, after the same tf.random.set_seed or keras.utils.set_random_seed"
    if stage not in shuffles or is_batched(inputs(stage)[0]):
        return with_seed
    size = int(stage._buffer_size)
    return (f"in place of shuffle({size}) and what follows it, write dataset = hvd.shard(dataset, shuffle={size})"
            f"{''.join(calls)}; or {with_seed}")


def _call(stage: Any) -> str:
    """Return the call that a user has written for a stage: `.map(load)`."""
    name = stage_name(stage)
    if name in ("Batch", "ParallelBatch", "PaddedBatch"):
        drops = ", drop_remainder=True" if stage._drop_remainder else ""
        return f".{'padded_' * (name == 'PaddedBatch')}batch({int(stage._batch_size)} // hvd.size(){drops})"
    if name == "Prefetch":
        size = int(stage._buffer_size)
        return f".prefetch({'tf.data.AUTOTUNE' if size == tf.data.AUTOTUNE else size})"
    if name in ("Repeat", "Take", "Skip"):
        count = int(stage._count)
        return f".{name.lower()}({count if count >= 0 else ''})"
    functions = stage._functions() if hasattr(stage, "_functions") else []
    name = re.sub("(?<=[a-z])(?=[A-Z])", "_", name.removeprefix("Parallel")).lower()
    argument = getattr(functions[0]._func, "__name__", "...") if functions else "..."
    return f".{name}({argument.replace('<lambda>', 'lambda ...')})"


def restarted(dataset: Any) -> Any:
    """Return a dataset in the order of its first epoch at its first reading; `dataset` if that is not provable."""
    with contextlib.suppress(UsageError):
        return reseeded(dataset, {id(stage): (stage._seed, stage._seed2) for stage in stages(dataset)
                                  if is_seeded(stage)})
    return dataset


def in_order_of_pass(dataset: Any, seed: int, of_pass: Any) -> Any:
    """Return a dataset for one pass of an elastic job, which ranks that join during the pass read in the same order.

    Args:
        seed: The seed of all passes.
        of_pass: The seed of this pass, a scalar int64 tensor.
    """
    repeats = any(stage_name(stage) == "Cache" and shuffle_seeds(stage) for stage in stages(dataset))
    if repeats or not shuffle_seeds(dataset):  # a cache repeats the order of its first pass
        return dataset
    with unconverted(), contextlib.suppress(UsageError):
        return reseeded(dataset, seeds_of_pass(dataset, seed, of_pass))
    return dataset


class _ShuffleDataset(tf.data.Dataset):  # type: ignore[misc]
    """A stage like TensorFlow's of this name, whose two seeds are given."""

    def __init__(self, stage: Any, source: Any, seeds: Seeds) -> None:
        self._input_dataset, self._buffer_size = source, stage._buffer_size
        self._reshuffle_each_iteration = stage._reshuffle_each_iteration
        self._seed, self._seed2 = (tf.convert_to_tensor(seed, tf.int64) for seed in seeds)
        super().__init__(tf.raw_ops.ShuffleDatasetV3(
            input_dataset=source._variant_tensor, buffer_size=self._buffer_size, seed=self._seed, seed2=self._seed2,
            seed_generator=tf.raw_ops.DummySeedGenerator(), reshuffle_each_iteration=self._reshuffle_each_iteration,
            **source._flat_structure))

    def _inputs(self) -> list[Any]:
        return [self._input_dataset]

    @property
    def element_spec(self) -> Any:
        """As that of its input."""
        return self._input_dataset.element_spec


class _RandomDataset(tf.data.Dataset):  # type: ignore[misc]
    """A source like TensorFlow's of this name, whose two seeds are given."""

    def __init__(self, stage: Any, seeds: Seeds) -> None:
        self._seed, self._seed2 = (tf.convert_to_tensor(seed, tf.int64) for seed in seeds)
        self._rerandomize = stage._rerandomize
        options = {"seed": self._seed, "seed2": self._seed2, **stage._flat_structure}
        super().__init__(tf.raw_ops.RandomDatasetV2(
            seed_generator=tf.raw_ops.DummySeedGenerator(), rerandomize_each_iteration=True, **options)
            if self._rerandomize else tf.raw_ops.RandomDataset(**options))

    def _inputs(self) -> list[Any]:
        return []

    @property
    def element_spec(self) -> Any:
        """A number."""
        return tf.TensorSpec([], tf.int64)


def shuffled_again(stage: Any, source: Any, seeds: Seeds) -> Any:
    """Return a stage that shuffles as another one does, of another source, with given seeds."""
    return _ShuffleDataset(stage, source, seeds)


_SEEDED: dict[str, Callable[[Any, Sequence[Any], Seeds], Any]] = {
    "Shuffle": lambda stage, sources, seeds: shuffled_again(stage, sources[0], seeds),
    "Random": lambda stage, _, seeds: _RandomDataset(stage, seeds),
}


def _parallel(stage: Any) -> dict[str, Any]:
    """Return the options of a stage that calls a function or batches in parallel."""
    if not hasattr(stage, "_num_parallel_calls"):
        return {}
    # One that does not store it gets the order that all ranks need.
    deterministic = {"true": True, "default": None, "false": False}[getattr(stage, "_deterministic", "true")]
    return {"num_parallel_calls": int(stage._num_parallel_calls), "deterministic": deterministic}


def _batched_again(stage: Any, source: Any, rows: int | None = None) -> Any:
    rows = int(stage._batch_size) if rows is None else rows
    return source.batch(rows, bool(stage._drop_remainder), **_parallel(stage))


def _mapped_again(stage: Any, source: Any) -> Any:
    return source.map(traced(stage._map_func), **_parallel(stage))


def _interleaved_again(stage: Any, source: Any) -> Any:
    return source.interleave(traced(stage._map_func), int(stage._cycle_length), int(stage._block_length),
                             **_parallel(stage))


def _cached_again(stage: Any, source: Any) -> Any:
    is_in_memory = not tf.get_static_value(stage._filename)  # a file may hold the order of an earlier run
    return source.cache() if is_in_memory else None


# Stages, and how they are applied again to other sources; None if that is unknown.
AGAIN: dict[str, Callable[..., Any]] = {
    "AssertCardinality": lambda stage, source: source.apply(
        tf.data.experimental.assert_cardinality(int(stage._expected_cardinality))),
    "Batch": _batched_again,
    "Cache": _cached_again,
    "Concatenate": lambda _, source, other: source.concatenate(other),
    "DenseToRagged": lambda stage, source: type(stage)(source, tf.int64),
    "DirectedInterleave": lambda stage, selector, *sources: type(stage)(
        selector, list(sources), stage._stop_on_empty_dataset),
    "Filter": lambda stage, source: source.filter(traced(stage._predicate)),
    "FlatMap": lambda stage, source: source.flat_map(traced(stage._map_func)),
    "Interleave": _interleaved_again,
    "Map": _mapped_again,
    "Options": lambda stage, source: source.with_options(stage.options()),
    "PaddedBatch": lambda stage, source: source.padded_batch(
        int(stage._batch_size), stage._padded_shapes, stage._padding_values, bool(stage._drop_remainder)),
    "ParallelBatch": _batched_again,
    "ParallelInterleave": _interleaved_again,
    "ParallelMap": _mapped_again,
    "Prefetch": lambda stage, source: source.prefetch(int(stage._buffer_size)),
    "Repeat": lambda stage, source: source.repeat(int(stage._count)),
    "Restructured": lambda stage, source: type(stage)(source, stage.element_spec),
    "Shard": lambda stage, source: source.shard(int(stage._num_shards), int(stage._index)),
    "Shuffle": lambda stage, source: _ShuffleDataset(stage, source, (stage._seed, stage._seed2)),
    "Skip": lambda stage, source: source.skip(int(stage._count)),
    "Take": lambda stage, source: source.take(int(stage._count)),
    "TakeWhile": lambda stage, source: source.take_while(traced(stage._predicate)),
    "Unbatch": lambda stage, source: type(stage)(source),
    "Unique": lambda _, source: source.unique(),
    "Window": lambda stage, source: source.window(
        int(stage._size), int(stage._shift), int(stage._stride), bool(stage._drop_remainder)),
    "Zip": lambda stage, *sources: tf.data.Dataset.zip(tf.nest.pack_sequence_as(stage._datasets, sources)),
}
