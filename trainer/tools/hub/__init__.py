"""A run on the Hugging Face Hub: its repository, the commit with the model, and the model card."""
