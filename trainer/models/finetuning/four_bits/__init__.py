"""A frozen base in four bits."""
