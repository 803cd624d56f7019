"""Bugs of real engines, one a file, put into ours: `python -m exercises.museum`."""
