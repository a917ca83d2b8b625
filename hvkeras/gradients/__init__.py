"""From the gradients of a step to collectives: optimizers, tapes, buckets."""
