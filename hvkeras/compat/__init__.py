"""All access to Keras beyond its public API, and all handling of differences between its versions.

Three families of optimizers exist: those of Keras 3, those of tf_keras, and the legacy optimizers of tf_keras
(`tf_keras.optimizers.legacy`). In each family, every update goes through one method (the seam): `apply` in Keras 3,
`apply_gradients` in tf_keras. Under mixed precision, a `LossScaleOptimizer` wraps the optimizer and decides whether to
skip the step, so it is a seam as well.
"""

from __future__ import annotations

from hvkeras.compat.families import (
    KERAS,
    TF_KERAS,
    TF_KERAS_LEGACY,
    adopt_class,
    default_keras,
    family_of,
    foreign_backend,
    is_keras_3,
    is_of_keras,
    loaded_families,
    subclass_like,
)
from hvkeras.compat.fit_data import batches_base, count_batches, loading_options, overrides
from hvkeras.compat.kept import Kept, derive_statistics, kept_variables
from hvkeras.compat.learned import (
    MOMENTS,
    OTHER,
    QUANTILES,
    SPACE,
    dynamic_value,
    fixed_width,
    is_dynamic,
    kind_of_learning,
    learned_function,
    learned_layers,
    learned_state,
    retrace,
    set_dynamic,
    take_learned_state,
    token_count,
)
from hvkeras.compat.models import (
    build_for,
    endings_of_saved,
    is_whole,
    model_weights,
    repair_optimizer,
)
from hvkeras.compat.optimizers import (
    CLIPS_BY_NORM,
    advance_iterations,
    as_learning_rate,
    attribute,
    build_optimizer,
    forget_slots,
    gradients_of,
    inner_optimizer,
    is_decayed,
    is_schedule,
    kind_of_update,
    learning_rate,
    learning_rate_source,
    numbered_slots,
    optimizer_variables,
    reduces_elsewhere,
    set_learning_rate,
    step_counter,
    updates_one_by_one,
    velocities,
    weighed_loss,
    with_slots,
)
from hvkeras.compat.strategies import OptimizerState, is_summed, number_of_replica, sum_over_replicas, summed, sums_once
from hvkeras.compat.traces import renew_traces
from hvkeras.compat.training import (
    Done,
    Passes,
    PassFacts,
    assigning_locally,
    begin_with_epoch,
    callback_class,
    fit_arguments,
    forget_train_function,
    global_seed,
    make_train_function,
    metric_groups,
    new_history,
    passes,
    seed_variables,
    settle_direction,
    steps_by_itself,
    steps_per_execution,
    with_arguments,
)
from hvkeras.compat.variables import (
    aggregation_of,
    as_array,
    is_overwritten,
    local_parts,
    multiply,
    native,
    run_in_session,
    value_of,
    variable_key,
    variable_like,
    variable_name,
)

__all__ = [
    "CLIPS_BY_NORM", "KERAS", "MOMENTS", "OTHER", "QUANTILES", "SPACE", "TF_KERAS", "TF_KERAS_LEGACY", "Done",
    "Kept", "OptimizerState", "PassFacts", "Passes", "adopt_class", "advance_iterations", "aggregation_of",
    "as_array", "as_learning_rate", "assigning_locally", "attribute", "batches_base", "begin_with_epoch",
    "build_for", "build_optimizer", "callback_class", "count_batches", "default_keras", "derive_statistics",
    "dynamic_value", "endings_of_saved", "family_of", "fit_arguments", "fixed_width", "foreign_backend",
    "forget_slots", "forget_train_function", "global_seed", "gradients_of", "inner_optimizer", "is_decayed",
    "is_dynamic", "is_keras_3", "is_of_keras", "is_overwritten", "is_schedule", "is_summed", "is_whole",
    "kept_variables", "kind_of_learning", "kind_of_update", "learned_function", "learned_layers", "learned_state",
    "learning_rate", "learning_rate_source", "loaded_families", "loading_options", "local_parts",
    "make_train_function", "metric_groups", "model_weights", "multiply", "native", "new_history",
    "number_of_replica", "numbered_slots", "optimizer_variables", "overrides", "passes", "reduces_elsewhere",
    "renew_traces", "repair_optimizer", "retrace", "run_in_session", "seed_variables", "set_dynamic",
    "set_learning_rate", "settle_direction", "step_counter", "steps_by_itself", "steps_per_execution",
    "subclass_like", "sum_over_replicas", "summed", "sums_once", "take_learned_state", "token_count",
    "updates_one_by_one", "value_of", "variable_key", "variable_like", "variable_name", "velocities",
    "weighed_loss", "with_arguments", "with_slots",
]
