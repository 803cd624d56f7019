"""What shows M2 and runs in no step: the stops of its walkthrough."""
