"""Stores: shared storage for an estimator's data, checkpoints and logs, which the driver and all ranks can access.

Files are read and written through pyarrow. Spark itself writes the Parquet data, and may need another URL for a path.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hvkeras.errors import NotInstalledError, UnsupportedError, UsageError, explain
from hvkeras.host.files import replace_durably

_DATA = ("intermediate_train_data", "intermediate_val_data", "intermediate_test_data")
_S3 = ("s3a://", "s3n://")  # Hadoop's names of s3://


class Store:
    """Folder on a file system that the driver and all ranks can access.

    Example:
        store = Store.create("/shared/experiments")
        store = Store.create("hdfs://namenode:8020/user/me/experiments")

    Args:
        prefix_path: The path or URL of the folder.
        train_path: The folder of training data; by default below `prefix_path`, as for all others.
        val_path: The folder of validation data.
        test_path: The folder of test data.
        runs_path: The folder of the runs' checkpoints and logs.
        save_runs: Whether to save checkpoints and logs.
        storage_options: Options for fsspec, which opens the URL if pyarrow cannot.
    """

    def __init__(
        self, prefix_path: str | os.PathLike[str], train_path: str | None = None, val_path: str | None = None,
        test_path: str | None = None, runs_path: str | None = None, save_runs: bool = True,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        self.prefix_path: str = os.fspath(prefix_path).rstrip("/")
        if not self.prefix_path:
            raise UsageError(explain("A store needs a folder", 'Store.create("/shared/experiments")',
                                     prefix_path=prefix_path))
        given = (train_path, val_path, test_path)
        self._data = tuple(path or f"{self.prefix_path}/{name}" for path, name in zip(given, _DATA, strict=True))
        self._runs = runs_path or f"{self.prefix_path}/runs"
        self._save_runs, self._storage_options = save_runs, storage_options or {}
        self._opened: tuple[Any, str] | None = None

    @staticmethod
    def create(prefix_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Store:
        """Create the store for a path or URL.

        Args:
            prefix_path: The folder: a path, or a URL such as hdfs://..., s3://..., gs://... or dbfs:/...
            *args: Additional arguments of the store's class.
            **kwargs: Additional keyword arguments.
        """
        text = os.fspath(prefix_path)
        classes: dict[str, type[Store]] = {"hdfs://": HDFSStore, "dbfs:/": DBFSLocalStore, "/dbfs/": DBFSLocalStore,
                                           "file:": LocalStore}
        cls = next((store for prefix, store in classes.items() if text.startswith(prefix)), None)
        return (cls or (FilesystemStore if "://" in text else LocalStore))(text, *args, **kwargs)

    # Paths of data and of runs.

    def get_train_data_path(self, idx: object = None) -> str:
        """Return the folder of training data; `idx` identifies one of several datasets."""
        return self._data_path(0, idx)

    def get_val_data_path(self, idx: object = None) -> str:
        """Return the folder of validation data."""
        return self._data_path(1, idx)

    def get_test_data_path(self, idx: object = None) -> str:
        """Return the folder of test data."""
        return self._data_path(2, idx)

    def _data_path(self, kind: int, idx: object) -> str:
        return self._data[kind] if idx is None else f"{self._data[kind]}.{idx}"

    def saving_runs(self) -> bool:
        """Return whether checkpoints and logs are saved."""
        return self._save_runs

    def get_runs_path(self) -> str:
        """Return the folder of all runs."""
        return self._runs

    def get_run_path(self, run_id: str) -> str:
        """Return the folder of a run."""
        return f"{self._runs}/{run_id}"

    def get_checkpoint_path(self, run_id: str) -> str:
        """Return the path of a run's best model."""
        return f"{self.get_run_path(run_id)}/{self.get_checkpoint_filename()}"

    def get_checkpoint_filename(self) -> str:
        """Return the file name of a checkpoint."""
        return "checkpoint.keras"

    def get_logs_path(self, run_id: str) -> str:
        """Return the log folder of a run."""
        return f"{self.get_run_path(run_id)}/{self.get_logs_subdir()}"

    def get_logs_subdir(self) -> str:
        """Return the name of the log folder."""
        return "logs"

    # Files.

    def exists(self, path: str) -> bool:
        """Return whether a file or folder exists."""
        filesystem, located = self.located(path)
        return bool(filesystem.get_file_info(located).type.value)

    def read(self, path: str) -> bytes:
        """Return a file's content."""
        filesystem, located = self.located(path)
        with filesystem.open_input_stream(located) as file:
            return bytes(file.read())

    def write(self, path: str, data: bytes) -> None:
        """Write a file atomically, and create its folder; on a local disk, the write survives a power loss."""
        filesystem, located = self.located(path)
        filesystem.create_dir(located.rpartition("/")[0], recursive=True)
        unfinished = f"{located}.unfinished"
        with filesystem.open_output_stream(unfinished) as file:
            file.write(data)
        if filesystem.type_name == "local":
            replace_durably(Path(unfinished), Path(located))
        else:
            filesystem.move(unfinished, located)

    def write_text(self, path: str, text: str) -> None:
        """Write a text file atomically, and create its folder."""
        self.write(path, text.encode())

    def delete(self, path: str) -> None:
        """Remove a folder, if it exists."""
        filesystem, located = self.located(path)
        if self.exists(path):
            filesystem.delete_dir(located)

    def is_parquet_dataset(self, path: str) -> bool:
        """Return whether a folder contains Parquet files."""
        from pyarrow.fs import FileSelector

        filesystem, located = self.located(path)
        found = filesystem.get_file_info(FileSelector(located, allow_not_found=True, recursive=True))
        return any(info.path.endswith(".parquet") for info in found)

    def located(self, path: str) -> tuple[Any, str]:
        """Return pyarrow's file system for a path of this store, and the path in it."""
        _require_pyarrow()
        if self._opened is None:
            self._opened = self._open()
        filesystem, root = self._opened
        if path.startswith(self.prefix_path):
            return filesystem, root + path[len(self.prefix_path) :]
        return filesystem, path.partition("://")[2] or path.removeprefix("file:")

    def for_spark(self, path: str) -> str:
        """Return the URL by which Spark reads and writes a path of this store."""
        return path

    def _open(self) -> tuple[Any, str]:
        """Return the file system, and the path of the store in it."""
        import pyarrow as pa
        from pyarrow import fs

        url = self.prefix_path
        for name in _S3:
            url = url.replace(name, "s3://", 1) if url.startswith(name) else url
        if not self._storage_options:
            try:
                return fs.FileSystem.from_uri(url)  # type: ignore[no-any-return]
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                pass  # fsspec may support it
        try:
            import fsspec
        except ImportError:
            raise UnsupportedError(explain("The store's URL must be one that pyarrow or fsspec can open",
                                           "pip install fsspec and its package for this URL",
                                           prefix_path=self.prefix_path)) from None
        filesystem, root = fsspec.core.url_to_fs(self.prefix_path, **self._storage_options)
        return fs.PyFileSystem(fs.FSSpecHandler(filesystem)), root

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.prefix_path!r})"


class FilesystemStore(Store):
    """Folder on any file system that pyarrow or fsspec supports: s3://, gs://, abfs://, file://, ...

    Args:
        prefix_path: The folder's URL.
        *args: Additional arguments of `Store`.
        **kwargs: Additional keyword arguments of `Store`.
    """

    def __init__(self, prefix_path: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(prefix_path, *args, **kwargs)


class LocalStore(Store):
    """Local folder; with executors on other hosts, one that all hosts mount at the same path.

    Args:
        *args: The folder, and additional arguments of `Store`.
        **kwargs: Keyword arguments of `Store`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        path = args[0] if args else kwargs.pop("prefix_path", "")
        text = os.fspath(path)
        text = "/" + text[len("file:") :].lstrip("/") if text.startswith("file:") else text
        super().__init__(str(Path(text).absolute()) if text else "", *args[1:], **kwargs)

    def for_spark(self, path: str) -> str:
        """Return the file:// URL of a path, as Spark's default file system may be another one."""
        return f"file://{path}"

    def _open(self) -> tuple[Any, str]:
        from pyarrow import fs

        return fs.LocalFileSystem(), self.prefix_path


class DBFSLocalStore(LocalStore):
    """Folder of the Databricks file system, which every host mounts at /dbfs.

    Args:
        prefix_path: dbfs:/... or /dbfs/...
        *args: Additional arguments of `Store`.
        **kwargs: Additional keyword arguments of `Store`.
    """

    def __init__(self, prefix_path: str, *args: Any, **kwargs: Any) -> None:
        text = os.fspath(prefix_path)
        local = "/dbfs/" + text.removeprefix("dbfs:").lstrip("/") if text.startswith("dbfs:") else text
        super().__init__(local, *args, **kwargs)

    def for_spark(self, path: str) -> str:
        """Return the dbfs:/ URL of a path."""
        return "dbfs:/" + path.removeprefix("/dbfs/").lstrip("/")


class HDFSStore(Store):
    """Folder on HDFS, accessed through pyarrow and Hadoop's libhdfs.

    Args:
        prefix_path: hdfs://host:port/folder, or the folder alone.
        host: The name node; by default from the URL or Hadoop's configuration.
        port: The port of the name node.
        user: The user; by default the user of this process.
        kerb_ticket: The path of a Kerberos ticket.
        driver: Accepted for compatibility with Horovod; pyarrow has one driver, libhdfs.
        extra_conf: Additional settings of Hadoop.
        *args: Additional arguments of `Store`.
        **kwargs: Additional keyword arguments of `Store`.
    """

    def __init__(
        self, prefix_path: str, host: str | None = None, port: int | None = None, user: str | None = None,
        kerb_ticket: str | None = None, driver: str = "libhdfs", extra_conf: dict[str, str] | None = None,
        *args: Any, **kwargs: Any,
    ) -> None:
        del driver
        location = prefix_path.removeprefix("hdfs://")
        authority, _, folder = location.partition("/") if location != prefix_path else ("", "", prefix_path.lstrip("/"))
        named, _, its_port = authority.rpartition(":") if ":" in authority else (authority, "", "")
        self._host, self._port = host or named or "default", port or int(its_port or 0)
        self._options = {"user": user, "kerb_ticket": kerb_ticket, "extra_conf": extra_conf}
        self._folder = f"/{folder.rstrip('/')}"
        address = "" if self._host == "default" else self._host + (f":{self._port}" if self._port else "")
        super().__init__(f"hdfs://{address}{self._folder}", *args, **kwargs)

    def _open(self) -> tuple[Any, str]:
        from pyarrow import fs

        return fs.HadoopFileSystem(self._host, self._port, **self._options), self._folder


def _require_pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401 - only checks that it is installed
    except ImportError:
        raise NotInstalledError(explain("pyarrow must be installed for stores",
                                        "pip install 'hvkeras[spark]'")) from None
