"""Parameters of estimators and models, with Horovod's names, as Params of pyspark.ml that can be saved and loaded.

Values that JSON cannot represent, such as models and functions, are pickled. Load only files that you trust.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pyspark.ml.param import Param, Params
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter

from hvkeras.errors import UsageError, explain
from hvkeras.spark.common.pickling import packed, unpacked

ClassT = TypeVar("ClassT", bound=type)
_PICKLE = "pickle"


@dataclass(frozen=True)
class Parameter:
    """Declaration of one parameter.

    Attributes:
        accessor: The name of its getter and setter, without `get` and `set`.
    """

    name: str
    accessor: str
    doc: str
    default: Any = None


def with_parameters(*table: Parameter) -> Callable[[ClassT], ClassT]:
    """Return a class decorator that adds parameters, each with the methods `get...` and `set...`."""

    def decorate(cls: ClassT) -> ClassT:
        for row in table:
            setattr(cls, row.name, Param(Params._dummy(), row.name, row.doc))
            setattr(cls, f"get{row.accessor}", _getter(row))
            setattr(cls, f"set{row.accessor}", _setter(row))
        return cls

    return decorate


def _getter(row: Parameter) -> Callable[[Any], Any]:
    def get(self: Any) -> Any:
        return self.getOrDefault(row.name)

    get.__name__, get.__doc__ = f"get{row.accessor}", f"Return `{row.name}`: {row.doc}"
    return get


def _setter(row: Parameter) -> Callable[[Any, Any], Any]:
    def set_(self: Any, value: Any) -> Any:
        return self._set(**{row.name: value})

    set_.__name__, set_.__doc__ = f"set{row.accessor}", f"Set `{row.name}`: {row.doc}"
    return set_


class PickledParams(MLWritable, MLReadable):  # type: ignore[misc]
    """Mixin that saves and loads parameters of any type."""

    def setParams(self, **kwargs: Any) -> Any:  # noqa: N802 - Horovod's name
        """Set parameters by name.

        Raises:
            UsageError: There is no such parameter.
        """
        unknown = [name for name in kwargs if not self.hasParam(name)]
        if unknown:
            raise UsageError(explain(f"{type(self).__name__} has no such parameter", "see its documentation",
                                     parameter=unknown[0]))
        return self._set(**kwargs)

    def write(self) -> MLWriter:
        """Return the writer: `estimator.write().overwrite().save(path)`."""
        return _Writer(self)

    @classmethod
    def read(cls) -> MLReader:
        """Return the reader; `cls.load(path)` is short for `cls.read().load(path)`."""
        return _Reader(cls)


class _Writer(MLWriter):  # type: ignore[misc]
    def __init__(self, instance: Any) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:  # noqa: N802 - Spark's name
        instance = self._instance
        values = {param.name: _encoded(value) for param, value in instance._paramMap.items()}
        DefaultParamsWriter.saveMetadata(instance, path, self.sparkSession, paramMap=values)


class _Reader(MLReader):  # type: ignore[misc]
    def __init__(self, cls: type) -> None:
        super().__init__()
        self._cls = cls

    def load(self, path: str) -> Any:
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession)
        instance = self._cls()
        if not metadata["class"].endswith(f".{self._cls.__name__}"):
            raise UsageError(explain(f"The folder must hold a {self._cls.__name__}", "load it with the class that saved"
                                     " it", path=path, holds=metadata["class"]))
        instance._resetUid(metadata["uid"])
        values = metadata["paramMap"]
        custom_objects = _decoded(values.get("custom_objects"))
        return instance._set(**{name: _decoded(value, custom_objects) for name, value in values.items()})


def _encoded(value: Any) -> Any:
    try:
        if json.loads(json.dumps(value)) == value:
            return value
    except (TypeError, ValueError):
        pass
    return {_PICKLE: base64.b64encode(packed(value)).decode()}


def _decoded(value: Any, custom_objects: Mapping[str, Any] | None = None) -> Any:
    if isinstance(value, dict) and set(value) == {_PICKLE}:
        return unpacked(base64.b64decode(value[_PICKLE]), custom_objects)
    return value


def names_of(values: Sequence[Parameter]) -> list[str]:
    """Return the names of parameters."""
    return [row.name for row in values]
