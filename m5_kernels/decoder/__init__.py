"""A decoder of our own: merged weights, attention over the paged cache, cut over ranks."""
