"""A frozen base in four or eight bits."""
