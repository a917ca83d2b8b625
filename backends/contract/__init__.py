"""The contract of a backend, as tests that anybody can run on a backend of their own.

    pytest --pyargs hvkeras.backends.contract --backend NAME [--ranks 2,4] [--launcher hvkeras|mpirun]

Each clause of `clauses` and `failures` is a test on real ranks, which names what `hvkeras.backends.interface` asks.
"""
