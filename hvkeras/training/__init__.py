"""Training support around Keras's `fit`, `evaluate` and `predict` in multi-rank jobs."""
