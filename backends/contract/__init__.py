"""Contract of a backend: conformance tests that authors of backends can run on their engine.

    pytest --pyargs hvkeras.backends.contract --backend NAME [--ranks 2,4] [--launcher hvkeras|mpirun]

Each clause of `clauses`, `capabilities` and `usage` is a requirement of `hvkeras.backends.interface`, and is tested on
real ranks.
"""
