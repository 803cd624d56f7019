"""What shows M2 and runs in no step: when the requests of its demo come."""
