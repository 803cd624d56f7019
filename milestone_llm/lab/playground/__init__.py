"""The schedulers of M1 to M4 under one's hands, over a model that costs nothing."""
