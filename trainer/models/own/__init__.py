"""A user's own module, and the code that it runs."""
