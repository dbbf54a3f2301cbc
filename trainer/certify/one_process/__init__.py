"""Parts of the one process that is compared with: what a run may take from its config."""
