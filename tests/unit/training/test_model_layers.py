"""What ranks compare of their models before the first step."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from hvkeras import compat
from hvkeras.errors import DivergenceError
from hvkeras.training.model_description import digest_of, layers_of, require_same_model


def model(units: int = 8, dropout: float = 0.2, activation: Any = "relu", strength: float = 0.01,
          initializer: Any = "zeros", seed: int | None = None, extra: bool = False) -> Any:
    return keras.Sequential([
        keras.Input((4,)), keras.layers.Dense(units, activation=activation, bias_initializer=initializer,
                                              kernel_regularizer=keras.regularizers.L2(strength)),
        keras.Sequential([keras.layers.Dropout(dropout, seed=seed)]), keras.layers.Dense(1),
        *([keras.layers.ReLU()] if extra else ()),
    ])


def difference(one: Any, other: Any) -> str:
    """What two ranks are told; "" if their models are the same."""
    everyone = [layers_of(one, ()), layers_of(other, ())]
    try:
        require_same_model([0, 3], everyone)
    except DivergenceError as error:
        assert digest_of(everyone[0]) != digest_of(everyone[1])
        return str(error)
    return ""


@pytest.mark.parametrize(("changed", "texts"), [
    ({"units": 9}, ("units of the layer dense", "rank_0='8', rank_3='9'")),
    ({"dropout": 0.5}, ("rate of the layer dropout", "rank_0='0.2', rank_3='0.5'")),
    ({"activation": "tanh"}, ("activation of the layer dense", "rank_0='relu', rank_3='tanh'")),
    ({"strength": 0.1}, ("kernel_regularizer of the layer dense", "0.01", "0.1")),
    ({"extra": True}, ("the number of layers", )),
])
def test_the_first_difference_is_named(changed: dict[str, Any], texts: tuple[str, ...]) -> None:
    found = difference(model(), model(**changed))
    assert found.startswith("All ranks must train the same model, but the models themselves differ in ")
    for text in (*texts, "HINT: build the model alike on every rank; a tuner must give all ranks the same trial"):
        assert text in found


@pytest.mark.parametrize("changed", [{}, {"seed": 7}, {"initializer": "ones"}, {"dropout": 0.2 + 1e-12}])
def test_names_seeds_initial_weights_and_rounding_may_differ(changed: dict[str, Any]) -> None:
    one, other = model(), model(**changed)
    assert layers_of(one, ())[0].name != layers_of(other, ())[0].name
    assert digest_of(layers_of(one, ())) == digest_of(layers_of(other, ()))


def test_models_of_tf_keras_without_weights_yet_are_compared() -> None:
    import tf_keras

    def unbuilt(units: int) -> Any:
        return tf_keras.Sequential([tf_keras.Sequential([tf_keras.layers.Dense(units)]), tf_keras.layers.Dense(1)])

    assert difference(unbuilt(3), unbuilt(3)) == ""
    assert "units of the layer dense" in difference(unbuilt(3), unbuilt(4))


def test_a_layer_of_another_class_is_named() -> None:
    other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.GaussianNoise(0.2)])
    assert "the class of a layer" in difference(keras.Sequential([*other.layers[:1], keras.layers.Dropout(0.2)]), other)


def test_a_layer_of_ones_own_is_compared_by_its_weights() -> None:
    class Own(keras.layers.Layer):
        def __init__(self, size: int, note: str) -> None:
            super().__init__()
            self.size, self.note = size, note

        def build(self, shape: Any) -> None:
            self.weight = self.add_weight(shape=(self.size,))

        def call(self, x: Any) -> Any:
            return x

    one, other = (keras.Sequential([keras.Input((4,)), Own(*given)]) for given in ((2, "here"), (3, "there")))
    assert "the shape of weight 1 of the layer own" in difference(one, other)
    assert "rank_0='[2]', rank_3='[3]'" in difference(one, other)
    assert difference(one, keras.Sequential([keras.Input((4,)), Own(2, "there")])) == ""


def test_a_model_that_only_some_ranks_have_built_may_still_become_the_same() -> None:
    layers = [keras.layers.LayerNormalization(), keras.layers.Dense(3)]
    built = keras.Sequential([keras.Input((4,)), keras.layers.LayerNormalization(), keras.layers.Dense(3)])
    assert difference(keras.Sequential(layers), built) == ""


def test_layers_that_each_rank_has_for_itself_are_left_out() -> None:
    one, other = model(), model(units=9)
    own = [{compat.variable_key(variable) for variable in made.layers[0].trainable_variables} for made in (one, other)]
    assert [len(layers_of(made, keys)) for made, keys in zip((one, other), own, strict=True)] == [
        len(layers_of(one, ())) - 1] * 2
    assert digest_of(layers_of(one, (), one.layers[:1])[:1]) == digest_of(layers_of(other, (), other.layers[:1])[:1])


def test_what_layers_learn_from_data_is_compared_elsewhere() -> None:
    def learned(mean: float) -> Any:
        return keras.Sequential([keras.Input((4,)), keras.layers.Normalization(mean=mean, variance=1.0)])

    assert difference(learned(0.0), learned(1.0)) == ""
