"""One record a step: kept, printed, written."""
