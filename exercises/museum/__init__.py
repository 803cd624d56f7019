"""Bugs of real engines, each in a file of its own, put into ours: `python -m exercises.museum`."""
