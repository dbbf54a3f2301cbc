"""The report on a run: its folder, drawn by matplotlib, as one HTML page with the pictures."""
