"""A partitioner for graphs of TensorFlow: the function of one process in, a function for each of several ranks out.

Of what the function computes from rows of data, each rank computes its own rows, as far as rules prove that this gives
the same result. What no rule divides is gathered, and computed by all.
"""
