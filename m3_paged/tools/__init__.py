"""What the demo shows of KV memory. No step runs it."""
