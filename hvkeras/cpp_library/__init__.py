"""The C++ library: operations that graphs use on every backend, and the functions of the native engine.

`paths` finds its file, `loading` loads it. The engine's own functions are declared in `hvkeras.backends.native`.
"""
