"""Progress of this rank: what it is doing, and where in the user's code it is."""
