"""The report on a run: its folder, read and drawn by matplotlib, as one HTML page with the pictures
in it.
"""
