"""When things happened on this rank: recorders, and the readers that make timelines and traces of them."""
