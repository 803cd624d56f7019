"""The engine's process, its pipe, and what HTTP needs of an engine, wherever it is."""
