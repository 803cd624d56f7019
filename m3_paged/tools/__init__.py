"""Tools of M3's demo, used in no step: its pictures of KV memory."""
