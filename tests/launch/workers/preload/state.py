"""Print the state of this process, before and after the import of TensorFlow, as JSON: that of a new Python process."""

import json
import os
import resource
import signal
import stat
import sys
import threading
import warnings

import __main__


def described(value):
    return value if isinstance(value, (str, int, type(None))) else type(value).__name__


def own(name):  # not the numbers of this job, which differ between jobs
    return not name.startswith(("HVKERAS_", "HOROVOD_", "HARNESS_"))


def read(path):
    with open(path, "rb") as file:
        return file.read().split(b"\0")


found = {
    "arguments": [sys.argv, sys.orig_argv, read("/proc/self/cmdline")],
    "name": read("/proc/self/comm"),
    "environment": {name: value for name, value in os.environ.items() if own(name)},
    "shown environment": sorted(entry for entry in read("/proc/self/environ") if own(entry.decode())),
    "main": {name: described(value) for name, value in vars(__main__).items() if name.startswith("__")},
    "is main": sys.modules["__main__"] is __main__ and __name__ == "__main__",
    "path": sys.path,
    "folder": os.getcwd(),
    "flags": [sys.flags, sys.warnoptions, sorted(sys._xoptions), sys.executable, sys.flags.hash_randomization],
    "filters": [str(one) for one in warnings.filters],
    "streams": [[stream.name, stream.encoding, stream.errors, stream.line_buffering, stream.isatty(), stream.mode]
                for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "descriptors": sorted((number, stat.S_IFMT(os.fstat(int(number)).st_mode)) for number in "012"),
    "open files": len(os.listdir("/proc/self/fd")) - 1,
    "threads": [len(os.listdir("/proc/self/task")), threading.current_thread().name],
    "leads a session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name[:7] == "RLIMIT_"},
    "umask": os.umask(0o22),
    "cores": sorted(os.sched_getaffinity(0)),
    "handlers": {number: described(signal.getsignal(number)) for number in range(1, 32)},
    "masked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "imported": [name for name in ("numpy", "tensorflow", "keras", "hvkeras", "wrapt", "h5py") if name in sys.modules],
    "parent": read(f"/proc/{os.getppid()}/comm"),
}
if "tensorflow" in sys.argv:
    import tensorflow as tf
    found["variables of the import"] = {name: value for name, value in os.environ.items()
                                        if own(name) and name not in found["environment"]}
    found["filters after the import"] = sorted({str(one) for one in warnings.filters})
    packages = {name.partition(".")[0] for name in sys.modules if getattr(sys.modules[name], "__spec__", None)}
    found["imported packages"] = sorted(packages - set(sys.stdlib_module_names))
    found["specs"] = {name: [str(getattr(sys.modules[name].__spec__, "origin", None)),
                             type(sys.modules[name].__loader__).__name__]
                      for name in ("tensorflow", "keras", "numpy", "tensorflow.python.framework.ops")}
    found["sum"] = float(tf.reduce_sum(tf.ones((3, 3)) @ tf.ones((3, 3))))
print(json.dumps(found, default=str, sort_keys=True))
