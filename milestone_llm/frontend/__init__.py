"""The engine that people call: prompts in, outputs out, around a core that knows only tokens."""
