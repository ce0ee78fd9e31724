"""Data sets of the papers: downloads, checksums and readers of the files as published."""
