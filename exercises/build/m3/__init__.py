"""The course of M3: KV memory in blocks, growth, copy-on-write, preemption."""
