"""Build Horovod 0.28.1 against the installed TensorFlow: `hvkeras build-horovod`.

Horovod's last release includes seven headers that TensorFlow has since moved, for an XLA operation that only GPU builds
compile. Stand-ins for these headers, placed first in the include path, let the release build unpatched (`stubs`). The
rest is what a manual build would need as well: prerequisites (`prerequisites`), and pip and cmake, with their progress
shown (`building`). Horovod itself records which TensorFlow it was built for; `hvkeras.backends.horovod` compares that
version with the installed one.
"""
