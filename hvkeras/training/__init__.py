"""What happens around Keras's `fit`, `evaluate` and `predict` in a job of several ranks."""
