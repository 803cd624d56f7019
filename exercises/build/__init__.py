"""The course in which you write what M2, M3 and M4 add: `python -m exercises.build` begins it."""
