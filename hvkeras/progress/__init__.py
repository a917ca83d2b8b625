"""What this rank is doing, and where in the user's code it is."""
