"""Build Horovod 0.28.1 against the installed TensorFlow: `hvkeras build-horovod`.

Horovod's last release includes seven headers that TensorFlow has moved since, for an XLA operation that only GPU builds
compile. With stubs of these headers first in the include path, the release builds unpatched (`stubs`). The rest is the
same as in a manual build: prerequisites (`prerequisites`), and pip and cmake with a progress bar (`building`). Horovod
records the TensorFlow version that it was built for; `hvkeras.backends.horovod` compares it with the installed one.
"""
