"""The engine's process, its pipe, and the interface through which HTTP uses an engine."""
