"""Horovod's place in hvkeras: scripts written for it (`as_horovod`, `keras_2`), and the build of its engine.

`hvkeras build-horovod` builds Horovod 0.28.1 against the installed TensorFlow.

Horovod's last release includes seven headers that TensorFlow has moved since, for an XLA operation that only GPU builds
compile. With stubs of these headers first in the include path, the release builds unpatched (`stubs`). The rest is the
same as in a manual build: prerequisites (`prerequisites`), and pip and cmake with a progress bar (`building`). Horovod
records the TensorFlow version that it was built for; `hvkeras.backends.horovod` compares it with the installed one.
"""
