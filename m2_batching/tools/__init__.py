"""Tools of M2's demo, used in no step: when its requests come."""
