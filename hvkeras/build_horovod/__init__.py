"""Builds Horovod 0.28.1 against the TensorFlow that is installed: `python -m hvkeras.build_horovod`.

Horovod's last release includes seven headers that TensorFlow has moved since, for an XLA operation that
only GPU builds compile. Stand-ins for these headers, put first in the include path, let the release build
unpatched (`stubs`). The rest is what a build by hand would need as well: prerequisites (`prerequisites`), and pip
and cmake with their progress shown (`building`). Which TensorFlow it was built for is noted by Horovod itself;
`hvkeras.backends.horovod` compares it with the installed one.
"""
