"""One command line and one report for all benches, workloads, and Hugging Face as the baseline."""
