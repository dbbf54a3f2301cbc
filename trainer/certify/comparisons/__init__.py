"""The comparisons of a run with one process, each of which gives findings."""
