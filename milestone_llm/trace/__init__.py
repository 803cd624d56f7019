"""One record a step: kept, printed, written. Engines hand their steps to it."""
