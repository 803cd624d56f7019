"""Records of a run, made into a page that replays it."""
