"""Makes a page from a run's records that replays the run."""
