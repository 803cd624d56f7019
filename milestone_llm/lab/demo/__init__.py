"""What the demos of all milestones share: a command line, work for engines, and the output."""
