"""Solutions of the Triton course, under the names of its files."""
