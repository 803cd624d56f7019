"""What people call: prompts in, outputs out, around the core that knows tokens only."""
