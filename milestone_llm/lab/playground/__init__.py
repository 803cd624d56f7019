"""The playground: try the schedulers of M1 to M4, with a model that costs nothing."""
