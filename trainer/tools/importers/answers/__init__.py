"""Other trainers' configs that compare a better with a worse answer: preferences and rewards."""
