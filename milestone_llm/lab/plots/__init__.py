"""Pictures of traces: timelines and maps of KV memory."""
