"""The courses in which you write the model and the engine: `python -m exercises.build`."""
