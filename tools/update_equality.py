"""Difference of the compiled update from the plain one after 200 steps, for each optimizer, as a Markdown table.

    python tools/update_equality.py

One process trains an MLP with `fit`, with and without `compile_update=True`. The table has the largest difference of a
weight, relative to the largest weight. For comparison, the last column has the effect of changed last bits in the
initial weights, because training itself amplifies rounding errors.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tf_keras

import hvkeras as hvd

STEPS, BATCH, WIDTH, CLASSES = 200, 16, 64, 10
LAST_BITS = 1e-7  # relative change in the last bits of a float32
NAMES = ("SGD", "RMSprop", "Adagrad", "Adadelta", "Adam", "AdamW", "Adamax", "Nadam", "Ftrl", "Lion", "Lamb", "Muon",
         "Adafactor", "ScheduleFreeAdamW")


def optimizers(family: Any) -> Mapping[str, Callable[[], Any]]:
    """Return constructors of optimizers of Keras 3 or tf_keras, by description."""
    made, adam, sgd = family.optimizers, family.optimizers.Adam, family.optimizers.SGD
    schedule = made.schedules.CosineDecay(0.01, STEPS)
    found = {name: functools.partial(getattr(made, name), 0.001) for name in NAMES if hasattr(made, name)}
    if family is tf_keras:
        return {f"tf_keras: {name}": found[name] for name in ("SGD", "Adam", "AdamW")}
    return {
        **found, "SGD, Nesterov momentum": functools.partial(sgd, 0.01, momentum=0.9, nesterov=True),
        "Adam, amsgrad": functools.partial(adam, 0.001, amsgrad=True),
        "Adam, `clipvalue`": functools.partial(adam, 0.001, clipvalue=0.001),
        "Adam, `clipnorm`": functools.partial(adam, 0.001, clipnorm=0.05),
        "Adam, `global_clipnorm`": functools.partial(adam, 0.001, global_clipnorm=0.05),
        "Adam, moving average that overwrites": functools.partial(adam, 0.001, use_ema=True, ema_overwrite_frequency=7),
        "Adam, accumulation over 4 steps": functools.partial(adam, 0.001, gradient_accumulation_steps=4),
        "Adam, cosine decay": functools.partial(adam, schedule),
        "Adam in a `LossScaleOptimizer`": lambda: made.LossScaleOptimizer(adam(0.001), dynamic_growth_steps=50),
    }


def trained(family: Any, optimizer: Any, noise: float = 0.0) -> list[Any]:
    """Return the weights after training, from initial weights with relative noise of this standard deviation."""
    family.utils.set_random_seed(1)
    random = np.random.default_rng(0)
    x = random.normal(size=(STEPS * BATCH, WIDTH)).astype("float32")
    y = np.argmax(x @ random.normal(size=(WIDTH, CLASSES)), axis=1)
    layers = family.layers
    model = family.Sequential([family.Input((WIDTH,)), layers.Dense(128, "relu"), layers.Dense(64, "relu"),
                               layers.Dense(CLASSES)])
    model.set_weights([weight * (1 + noise * random.standard_normal(weight.shape)) for weight in model.get_weights()])
    if family is keras:
        optimizer.build(model.trainable_variables)  # otherwise ScheduleFreeAdamW restarts in each step of `fit`
    model.compile(optimizer, family.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return [np.array(weight) for weight in model.get_weights()]


def difference(weights: list[Any], others: list[Any]) -> str:
    """Return the largest difference, relative to the largest weight."""
    largest = max(float(np.abs(one - other).max()) for one, other in zip(weights, others, strict=True))
    return f"{largest / max(float(np.abs(one).max()) for one in others):.1e}" if largest else "0, bit-identical"


def main() -> None:
    """Train, and print the table."""
    os.environ["HVKERAS_LOG_LEVEL"] = "ERROR"
    hvd.init("local")
    print("| optimizer | compiled | changed last bits at the start |\n| --- | --- | --- |")
    for family in (keras, tf_keras):
        for name, make in optimizers(family).items():
            plain, compiled = (trained(family, hvd.DistributedOptimizer(make(), compile_update=compile_update))
                               for compile_update in (False, True))
            perturbed = trained(family, make(), LAST_BITS)
            print(f"| {name} | {difference(compiled, plain)} | {difference(perturbed, plain)} |", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
