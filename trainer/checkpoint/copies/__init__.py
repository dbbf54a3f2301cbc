"""A copy of a run at an address: making it, who writes it, and starting from it."""
